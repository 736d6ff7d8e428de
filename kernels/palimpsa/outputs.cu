// Outputs, the states at the start of every chunk and the last ones, from the first block to the last. The states of a warp's keys lie in shared
// memory, v, beta and o of a block's tokens in registers.

static_assert(AT_HAND == 2, "one is at work, one on its way");
constexpr int SHARES = GROUPS * S * LANES;  // behind a block: each group's share of o, where its numbers were
constexpr int VALUES = WHOLE ? S * LANES + S * LANES / 2 : 0;  // beta, and v in bfloat16
constexpr int BLOCK = GATES + (TABLE + VALUES > SHARES ? TABLE + VALUES : SHARES);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) outputs(
    const float* __restrict__ numbers, const float* __restrict__ gates, const bfloat16* __restrict__ v, const float* __restrict__ beta,
    const float* __restrict__ M_first, const float* __restrict__ J_first, float* __restrict__ M_starts, float* __restrict__ J_starts,
    float* __restrict__ M_last, float* __restrict__ J_last, bfloat16* __restrict__ o, float scale, int T, int N, int BLOCKS) {
  float* const blocks = (float*)memory;     // [AT_HAND, BLOCK]
  float* const M_at = blocks + AT_HAND * BLOCK;   // [K, 32]: each number is one thread's alone
  float* const J_at = M_at + K * LANES;
  const int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES, value = blockIdx.x * LANES + lane;
  const int64 bh = blockIdx.y, row = bh / H * T * H + bh % H;
  const bool inside = WHOLE || value < V;
  numbers += bh * BLOCKS * TABLE;
  gates += bh * BLOCKS * GATES;
  M_starts += bh * (N + 1) * (K * V) + value;
  J_starts += bh * (N + 1) * (K * V) + value;
  for (int key = group; key < K; key += GROUPS) {
    const int64 there = bh * (K * V) + key * V + value;
    M_at[key * LANES + lane] = inside ? M_first[there] : 0.f;
    J_at[key * LANES + lane] = inside ? J_first[there] : 0.f;
  }
  auto fetch = [&](int block) {
    float* const to = blocks + block % 2 * BLOCK;
    copy<GATES>(to, gates + (int64)block * GATES);
    copy<TABLE>(to + GATES, numbers + (int64)block * TABLE);
    if (WHOLE) {
      const int64 rows = (row + (int64)block * S * H) * V + value - lane;
      copy_tokens(to + GATES + TABLE, beta + rows, T - block * S);
      copy_tokens((bfloat16*)(to + GATES + TABLE + S * LANES), v + rows, T - block * S);
    }
  };
  fetch(0);

  for (int block = 0; block < BLOCKS; block++) {
    const int n = block * S / C;
    const int64 rows = (row + (int64)block * S * H) * V + value;  // of the block's first token
    float *const gate = blocks + block % 2 * BLOCK, *const table = gate + GATES, *const beta_at = table + TABLE + lane;
    const bfloat16* const v_at = (const bfloat16*)(table + TABLE + S * LANES) + lane;
    copies_done();
    __syncthreads();
    if (block + 1 < BLOCKS) fetch(block + 1);
    float v_S[S], beta_S[S], o_S[S], prior_S[S];  // v / c, 2 beta / c, o, prior / c
#pragma unroll
    for (int t = 0; t < S; t++) {
      const bool there = inside && block * S + t < T;
      v_S[t] = gate[t] * (WHOLE ? to_float(v_at[t * LANES]) : there ? to_float(v[rows + t * (H * V)]) : 0.f);
      beta_S[t] = 2.f * gate[t] * (WHOLE ? beta_at[t * LANES] : there ? beta[rows + t * (H * V)] : 0.f);
      prior_S[t] = gate[2 * S + t];
      o_S[t] = 0.f;
    }
    const float c_end = gate[3 * S + 1];

    auto through = [&]<bool TAKEN>() {
      for (int key = group; key < K; key += GROUPS) {
        float M = M_at[key * LANES + lane], J = J_at[key * LANES + lane];
        if (block * S == n * C && inside) {
          M_starts[(int64)n * (K * V) + key * V] = M;
          J_starts[(int64)n * (K * V) + key * V] = J;
        }
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
          const Quad x(table + key * (3 * S), quad);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int t = 4 * quad + i;
            if (TAKEN) {
              M = decayed(M, gate[S + t]);
              J = decayed(J, gate[S + t]);
            }
            M = fmaf(x.k[i], v_S[t], M);  // said exactly: a token's bits are not of the tokens behind it
            J = fmaf(x.half_kk[i], beta_S[t], J);
            o_S[t] = fmaf(x.q[i], M * reciprocal(J + prior_S[t]), o_S[t]);
          }
        }
        M_at[key * LANES + lane] = c_end * M;
        J_at[key * LANES + lane] = c_end * J;
      }
    };
    if (gate[3 * S] > 0.f)
      through.template operator()<true>();
    else
      through.template operator()<false>();

    __syncthreads();  // the table is read
#pragma unroll
    for (int t = 0; t < S; t++) table[(group * S + t) * LANES + lane] = o_S[t];
    __syncthreads();
    SHARED_OUT(i, S * LANES) {
      float sum = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) sum += table[g * S * LANES + i];
      if (inside && block * S + i / LANES < T) o[rows + i / LANES * (H * V)] = to_bfloat16(scale * sum);
    }
  }
  for (int key = group; key < K; key += GROUPS)
    if (inside) {
      const float M = M_at[key * LANES + lane], J = J_at[key * LANES + lane];
      M_last[bh * (K * V) + key * V + value] = M_starts[(int64)N * (K * V) + key * V] = M;
      J_last[bh * (K * V) + key * V + value] = J_starts[(int64)N * (K * V) + key * V] = J;
    }
}
