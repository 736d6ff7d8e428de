// All gradients, from the last block to the first. M, J, P and Q of a warp's keys lie in shared memory, v, beta, do and their gradients of a block's
// tokens in registers.
//
// M and J behind a block are there; each token's writing is taken out of them again, and behind a chunk they are fetched, exact. The decay's
// gradient comes from sums that are at hand: with D = sum_kv M P + J Q behind token t, which scales cancel out of,
//     D <- D + prior_t sum_kv (Q's change by t) - sum_v (v dv + beta dbeta)     is what it was before t, and t's own.
// Both subtract, and lose as many digits as a chunk decays: blocks with strong decays are gone through forth and back instead.

static_assert(S == 16 && C == 2 * S, "sums over values are laid out for 16 tokens, and a chunk for two blocks");
constexpr int VALUES = WHOLE ? 2 * S * LANES : 0;  // beta, and v and do in bfloat16
constexpr int BLOCK = GATES + TABLE + VALUES;
constexpr int PART = 8 * S + S;  // a warp's eight partial sums for each token, and room so that two such lie in different banks

// Two sums over a warp's values for each token, dq and dk of a key. Four tokens' numbers are added over each four neighbouring threads by
// tensor cores (tf32), which also gather 16 tokens' sums in four registers; the eight that are left meet in shared memory.
struct Sums {
  float dq[4] = {}, dk[4] = {}, dq_4[4], dk_4[4];

  DEVICE void put(int t, int lane, float dq_t, float dk_t) {  // from the last token to the first
    const int place = t % 2 * 2 + t % 4 / 2;
    dq_4[place] = dq_t;
    dk_4[place] = dk_t;
    if (t % 4 == 0) {  // to columns t / 2 and t / 2 + 1
      const float even = lane / 4 == t / 2 ? 1.f : 0.f, odd = lane / 4 == t / 2 + 1 ? 1.f : 0.f;
      multiply_add(dq, dq_4, even, odd);
      multiply_add(dk, dk_4, even, odd);
    }
  }

  DEVICE float over_warp(int lane, float* part) const {  // thread t has dq of token t, thread S + t its dk
    wait_for_warp();
    *(float4*)(part + lane * 4) = make_float4(dq[0], dq[1], dq[2], dq[3]);
    *(float4*)(part + PART + lane * 4) = make_float4(dk[0], dk[1], dk[2], dk[3]);
    wait_for_warp();
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < 8; g++) sum += part[lane / S * PART + g * S + lane % S];
    return sum;
  }
};

typedef float PerToken[S];

// Sums over a warp for each token: threads 2 t and 2 t + 1 get a half of token t's, in x[0].
template <int HALF>
DEVICE void halve(PerToken& x, int lane) {
  const bool upper = lane & 2 * HALF;
#pragma unroll
  for (int t = 0; t < HALF; t++) {
    const float kept = upper ? x[t + HALF] : x[t], told = upper ? x[t] : x[t + HALF];
    x[t] = kept + shuffle_xor(told, 2 * HALF);
  }
  if constexpr (HALF > 1) halve<HALF / 2>(x, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gradients(
    const float* __restrict__ numbers, const float* __restrict__ gates, const bfloat16* __restrict__ v, const float* __restrict__ beta,
    const float* __restrict__ prior, const float* __restrict__ M_starts, const float* __restrict__ J_starts,
    const bfloat16* __restrict__ dout, float* __restrict__ P_end, float* __restrict__ Q_end, float* __restrict__ shares,
    bfloat16* __restrict__ dv, float* __restrict__ dbeta, float* __restrict__ dlog_decay, float* __restrict__ dprior, float scale, int T,
    int N, int BLOCKS, int BH) {
  float* const blocks = (float*)memory;    // [AT_HAND, BLOCK]
  float* const M_at = blocks + AT_HAND * BLOCK;  // [K, 32]: each number is one thread's alone
  float* const J_at = M_at + K * LANES;
  float* const P_at = J_at + K * LANES;
  float* const Q_at = P_at + K * LANES;
  float* const parts = Q_at + K * LANES;                // [GROUPS, 2, PART]; behind a block each group's share of dlog_decay
  float* const dv_at = parts + GROUPS * 2 * PART;       // [GROUPS, S, 32], a group's share
  float* const dbeta_at = dv_at + GROUPS * S * LANES;
  const int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES, tile = blockIdx.x, value = tile * LANES + lane;
  float* const part = parts + group * 2 * PART;
  const int64 bh = blockIdx.y, row = bh / H * T * H + bh % H;
  const bool inside = WHOLE || value < V;
  numbers += bh * BLOCKS * TABLE;
  gates += bh * BLOCKS * GATES;
  shares += (tile * (int64)BH + bh) * BLOCKS * (K * 2 * S);
  M_starts += bh * (N + 1) * (K * V) + value;
  J_starts += bh * (N + 1) * (K * V) + value;
  P_end += bh * (K * V) + value;
  Q_end += bh * (K * V) + value;
  float dprior_sum = 0.f;

  auto states_from = [&](int n) {
    for (int key = group; key < K; key += GROUPS) {
      const int64 there = (int64)n * (K * V) + key * V;
      M_at[key * LANES + lane] = inside ? M_starts[there] : 0.f;
      J_at[key * LANES + lane] = inside ? J_starts[there] : 0.f;
    }
  };
  auto fetch = [&](int block) {
    float* const to = blocks + block % AT_HAND * BLOCK;
    copy<GATES>(to, gates + (int64)block * GATES);
    copy<TABLE>(to + GATES, numbers + (int64)block * TABLE);
    if (WHOLE) {
      const int64 rows = (row + (int64)block * S * H) * V + tile * LANES;
      copy_tokens(to + GATES + TABLE, beta + rows, T - block * S);
      copy_tokens((bfloat16*)(to + GATES + TABLE + S * LANES), v + rows, T - block * S);
      copy_tokens((bfloat16*)(to + GATES + TABLE + S * LANES) + S * LANES, dout + rows, T - block * S);
    }
  };
  // v / c, 2 beta / c and scale do of a block that was fetched
  auto values_of = [&](int block, PerToken& v_S, PerToken& beta_S, PerToken& do_S) {
    const float *const gate = blocks + block % AT_HAND * BLOCK, *const beta_at = gate + GATES + TABLE + lane;
    const bfloat16* const v_at = (const bfloat16*)(gate + GATES + TABLE + S * LANES) + lane;
    const int64 rows = (row + (int64)block * S * H) * V + value;
#pragma unroll
    for (int t = 0; t < S; t++) {
      const bool there = inside && block * S + t < T;
      const int64 at = rows + t * (H * V);
      v_S[t] = gate[t] * (WHOLE ? to_float(v_at[t * LANES]) : there ? to_float(v[at]) : 0.f);
      beta_S[t] = 2.f * gate[t] * (WHOLE ? beta_at[t * LANES] : there ? beta[at] : 0.f);
      do_S[t] = scale * (WHOLE ? to_float(v_at[(S + t) * LANES]) : there ? to_float(dout[at]) : 0.f);
    }
  };
  // each group's share of dv, dbeta and dlog_decay
  auto give = [&](PerToken& dv_S, PerToken& dbeta_S, PerToken& dlog_decay_S) {
#pragma unroll
    for (int t = 0; t < S; t++) {
      dv_at[(group * S + t) * LANES + lane] = dv_S[t];
      dbeta_at[(group * S + t) * LANES + lane] = dbeta_S[t];
    }
    halve<S / 2>(dlog_decay_S, lane);
    const float sum = dlog_decay_S[0] + shuffle_xor(dlog_decay_S[0], 1);
    wait_for_warp();  // its part is read
    if (lane % 2 == 0) part[lane / 2] = sum;
  };

  // for all threads, who are through with what was there
  auto arrives = [&](int block) {
    if (AT_HAND == 1) {
      __syncthreads();
      fetch(block);
    }
    copies_done();
    __syncthreads();
  };

  if (AT_HAND == 2) fetch(BLOCKS - 1);
  states_from(N);
  for (int key = group; key < K; key += GROUPS) {
    P_at[key * LANES + lane] = inside ? P_end[key * V] : 0.f;
    Q_at[key * LANES + lane] = inside ? Q_end[key * V] : 0.f;
  }

  for (int block = BLOCKS - 1; block >= 0; block--) {
    const int n = block * S / C;
    const bool chunk_starts = block * S == n * C;
    const float *const gate = blocks + block % AT_HAND * BLOCK, *const table = gate + GATES;
    arrives(block);
    if (AT_HAND == 2 && block > 0) fetch(block - 1);
    const bool strong = gate[3 * S] > 0.f;  // of this block, whatever comes to its place
    const float c_end = gate[3 * S + 1], over_c_end = gate[S - 1];
    float* const share = shares + (int64)block * (K * 2 * S) + lane;

    if (strong) {
      states_from(n);
      if (!chunk_starts) {  // and through the chunk's first block
        arrives(block - 1);
        const float *const gate = blocks + (block - 1) % AT_HAND * BLOCK, *const table = gate + GATES;
        float v_S[S], beta_S[S], do_S[S];
        values_of(block - 1, v_S, beta_S, do_S);
        for (int key = group; key < K; key += GROUPS) {
          const float *k = table + key * (3 * S), *half_kk = k + S;
          float M = M_at[key * LANES + lane], J = J_at[key * LANES + lane];
#pragma unroll
          for (int t = 0; t < S; t++) {
            M = decayed(M, gate[S + t]) + k[t] * v_S[t];
            J = decayed(J, gate[S + t]) + half_kk[t] * beta_S[t];
          }
          M_at[key * LANES + lane] = gate[3 * S + 1] * M;
          J_at[key * LANES + lane] = gate[3 * S + 1] * J;
        }
        if (AT_HAND == 1) arrives(block);
      }
      float v_S[S], beta_S[S], do_S[S], dv_S[S] = {}, dbeta_S[S] = {}, dlog_decay_S[S] = {};
      values_of(block, v_S, beta_S, do_S);
      for (int key = group; key < K; key += GROUPS) {
        const int here = key * LANES + lane;
        const float *k = table + key * (3 * S), *half_kk = k + S, *q = k + 2 * S;
        float P = c_end * P_at[here], Q = c_end * Q_at[here], M_S[S + 1], J_S[S + 1];
        M_S[0] = M_at[here];
        J_S[0] = J_at[here];
#pragma unroll
        for (int t = 0; t < S; t++) {
          M_S[t + 1] = decayed(M_S[t], gate[S + t]) + k[t] * v_S[t];
          J_S[t + 1] = decayed(J_S[t], gate[S + t]) + half_kk[t] * beta_S[t];
        }
        Sums sums;
#pragma unroll
        for (int t = S - 1; t >= 0; t--) {
          const float r = reciprocal(J_S[t + 1] + gate[2 * S + t]), X = M_S[t + 1] * r, w = q[t] * (do_S[t] * r);
          P += w;
          Q -= w * X;
          dprior_sum -= gate[2 * S + t] * (w * X);
          dv_S[t] += k[t] * P;
          dbeta_S[t] += half_kk[t] * Q;
          sums.put(t, lane, X * do_S[t], P * v_S[t] + k[t] * Q * beta_S[t]);
          P = decayed(P, gate[S + t]);
          Q = decayed(Q, gate[S + t]);
          dlog_decay_S[t] += M_S[t] * P + J_S[t] * Q;
        }
        P_at[here] = P;
        Q_at[here] = Q;
        share[key * (2 * S)] = sums.over_warp(lane, part);
      }
      give(dv_S, dbeta_S, dlog_decay_S);
    } else {
      float v_S[S], beta_S[S], do_S[S], dv_S[S] = {}, dbeta_S[S] = {}, Q_S[S] = {}, prior_S[S];  // Q_S: before each token, over all keys
      float D = 0.f, Q_behind = 0.f;
      values_of(block, v_S, beta_S, do_S);
#pragma unroll
      for (int t = 0; t < S; t++) prior_S[t] = gate[2 * S + t];
      for (int key = group; key < K; key += GROUPS) {
        const int here = key * LANES + lane;
        float M = over_c_end * M_at[here], J = over_c_end * J_at[here], P = c_end * P_at[here], Q = c_end * Q_at[here];
        D += M * P;
        D += J * Q;
        Q_behind += Q;
        Sums sums;
#pragma unroll
        for (int quad = QUADS - 1; quad >= 0; quad--) {
          const Quad x(table + key * (3 * S), quad);
#pragma unroll
          for (int i = 3; i >= 0; i--) {
            const int t = 4 * quad + i;
            const float r = reciprocal(J + prior_S[t]), X = M * r, qr = x.q[i] * r, Xdo = X * do_S[t];
            M = fmaf(-x.k[i], v_S[t], M);
            J = fmaf(-x.half_kk[i], beta_S[t], J);
            P = fmaf(qr, do_S[t], P);
            Q = fmaf(-qr, Xdo, Q);
            Q_S[t] += Q;
            dv_S[t] = fmaf(x.k[i], P, dv_S[t]);
            dbeta_S[t] = fmaf(x.half_kk[i], Q, dbeta_S[t]);
            sums.put(t, lane, Xdo, fmaf(x.k[i] * Q, beta_S[t], P * v_S[t]));
          }
        }
        P_at[here] = P;
        Q_at[here] = Q;
        M_at[here] = M;
        J_at[here] = J;
        share[key * (2 * S)] = sums.over_warp(lane, part);
      }
#pragma unroll
      for (int t = S - 1; t >= 0; t--) {
        const float read = prior_S[t] * (Q_behind - Q_S[t]);
        Q_behind = Q_S[t];
        dprior_sum -= read;
        Q_S[t] = D = D + read - v_S[t] * dv_S[t] - beta_S[t] * dbeta_S[t];
      }
      give(dv_S, dbeta_S, Q_S);
    }
    __syncthreads();

    if (chunk_starts && !strong) {  // what the block before begins with
      if (!WHOLE)
        states_from(n);
      else
        SHARED_OUT(i, K * LANES / 4) {
          const int64 from = (int64)n * (K * V) + i / (LANES / 4) * V + i % (LANES / 4) * 4 - lane;
          copy_16(M_at + i * 4, M_starts + from, true);
          copy_16(J_at + i * 4, J_starts + from, true);
        }
    }
    SHARED_OUT(i, S * LANES) {  // over the groups of keys
      const int t = i / LANES;
      float dv_t = 0.f, dbeta_t = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        dv_t += dv_at[g * S * LANES + i];
        dbeta_t += dbeta_at[g * S * LANES + i];
      }
      if (inside && block * S + t < T) {
        const int64 at = (row + (int64)(block * S + t) * H) * V + value;
        dv[at] = to_bfloat16(gate[t] * dv_t);
        dbeta[at] = 2.f * gate[t] * dbeta_t;
      }
    }
    if (thread < S && block * S + thread < T) {
      float sum = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) sum += parts[g * 2 * PART + thread];
      dlog_decay[(int64)tile * (BH / H) * T * H + row + (int64)(block * S + thread) * H] = sum;
    }
  }

  for (int key = group; key < K; key += GROUPS)
    if (inside) {
      P_end[key * V] = P_at[key * LANES + lane];
      Q_end[key * V] = Q_at[key * LANES + lane];
    }
#pragma unroll
  for (int mask = LANES / 2; mask; mask /= 2) dprior_sum += shuffle_xor(dprior_sum, mask);
  __syncthreads();
  if (lane == 0) parts[group] = dprior_sum;
  __syncthreads();
  if (thread == 0) {
    float sum = 0.f;
    for (int g = 0; g < GROUPS; g++) sum += parts[g];
    dprior[tile * BH + bh] = sum / prior[bh % H];  // times the prior, until here
  }
}
