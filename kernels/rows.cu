// A product of up to 8 TILES rows with a weight [outputs, INPUTS], bfloat16, with what stands around it in a block (kernels/rows.py). Such a product takes the
// time of the weight's bytes, so all of a program's are asked for at once, into registers, with EARLY before the kernel before has ended.
//
// A program has 16 rows of the weight, GATED 8 of either half, and each of its WARPS a part of their inputs; what they sum is added up in shared memory.
// Tensor cores take 16 inputs in any order that is both operands' own: 4 threads a row, each with 8 inputs in line for two products.
constexpr int PART = INPUTS / WARPS, CHUNKS = PART / 32;
static_assert(PART % 32 == 0);


DEVICE float square(unsigned x) {
  const float low = to_float((bfloat16)(x & 0xffff)), high = to_float((bfloat16)(x >> 16));
  return low * low + high * high;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
rows(const bfloat16* x, const bfloat16* __restrict__ weight, const bfloat16* residual, void* y, int M, int J, float epsilon, float cap) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, first = warp * PART + lane % 4 * 8;
  const int outputs = GATED ? 8 : 16, j = blockIdx.x * outputs;
  const bfloat16* low = weight + (int64)min(j + group, J - 1) * INPUTS + first;
  const bfloat16* high = weight + (GATED ? (int64)(J + min(j + group, J - 1)) : (int64)min(j + group + 8, J - 1)) * INPUTS + first;
  uint4 w[CHUNKS][2];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) w[c][0] = weight_16(low + c * 32), w[c][1] = weight_16(high + c * 32);
#if EARLY
  wait_for_kernel_before();
  let_next_begin();
#endif
  float sums[TILES][4] = {}, squares[TILES] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int row = n * 8 + group;
      uint4 of_x = {0, 0, 0, 0};
      if (row < M) of_x = *(const uint4*)(x + (int64)row * INPUTS + first + c * 32);
      multiply_add(sums[n], w[c][0].x, w[c][1].x, w[c][0].y, w[c][1].y, of_x.x, of_x.y);
      multiply_add(sums[n], w[c][0].z, w[c][1].z, w[c][0].w, w[c][1].w, of_x.z, of_x.w);
      if (NORM) squares[n] += (square(of_x.x) + square(of_x.y)) + (square(of_x.z) + square(of_x.w));
    }

  // sums[n]: (output group, rows 2 t and 2 t + 1 of the tile), then (output group + 8, the same), t = lane % 4; squares[n]: of row `group`.
  float *shared = (float*)memory, *shared_squares = shared + WARPS * TILES * 128;
  for (int n = 0; n < TILES; n++) {
    for (int i = 0; i < 4; i++) shared[(warp * TILES + n) * 128 + lane * 4 + i] = sums[n][i];
    if (NORM) {
      squares[n] += shuffle_xor(squares[n], 1);
      squares[n] += shuffle_xor(squares[n], 2);
      if (lane % 4 == 0) shared_squares[warp * TILES * 8 + n * 8 + group] = squares[n];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * (GATED ? 64 : 128); i += 32 * WARPS) {
    // Of a tile: which of its numbers, whose thread had it, and what it is of.
    const int n = i / (GATED ? 64 : 128), its = i % (GATED ? 64 : 128), of = GATED ? its / 2 : its / 4, which = GATED ? its % 2 : its % 4;
    const int row = n * 8 + of % 4 * 2 + which % 2, output = j + of / 4 + which / 2 * 8;
    if (row >= M || output >= J) continue;
    float a = 0, b = 0, norm = 1;
    for (int warp = 0; warp < WARPS; warp++) {
      a += shared[(warp * TILES + n) * 128 + of * 4 + which];
      if (GATED) b += shared[(warp * TILES + n) * 128 + of * 4 + 2 + which];
    }
    if (NORM) {
      float sum = 0;
      for (int warp = 0; warp < WARPS; warp++) sum += shared_squares[warp * TILES * 8 + row];
      norm = 1 / sqrtf(sum / INPUTS + epsilon);
    }
    a *= norm, b *= norm;
    if (GATED) a *= b / (1 + expf(-a));
    const int64 at = (int64)row * J + output;
    if (residual) a += to_float(residual[at]);
    if (CAP) a = cap * tanhf(a / cap);
    if (WIDE) ((float*)y)[at] = a;
    else ((bfloat16*)y)[at] = to_bfloat16(a);
  }
}
