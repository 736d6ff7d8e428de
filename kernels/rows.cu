// A product of up to 8 TILES rows with a weight [outputs, INPUTS], bfloat16, with what stands around it in a block (kernels/rows.py). Such a product takes the
// time of the weight's bytes, so all of a program's are asked for at once, with EARLY before the kernel before has ended; and they go to shared memory, of
// which a processor has as much as it has registers, so that more programs are under way: each thread to its own 16 bytes, which nobody else reads.
//
// A program has OUTPUTS rows of the weight, GATED as many of either half, and each of its WARPS a part of their inputs; what they sum is added up.
// Tensor cores take 16 rows of a weight at once, GATED up to 8 of either half, TILES_OF_W times. Of 16 inputs they take any order that is both operands' own:
// 4 threads a row, each with 8 inputs in line for two products.
constexpr int PART = INPUTS / WARPS, CHUNKS = PART / 32, THREADS = 32 * WARPS;
constexpr int ROWS = GATED && OUTPUTS < 8 ? OUTPUTS : 8, STEP = GATED ? ROWS : 16, TILES_OF_W = (OUTPUTS + STEP - 1) / STEP;
constexpr int SIDES = GATED || OUTPUTS > 8 ? 2 : 1, SLOTS = 4 * ROWS * WARPS;  // a tile's rows: ROWS and as many again, or only those
static_assert(PART % 32 == 0);

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
rows(const bfloat16* x, const bfloat16* __restrict__ weight, const bfloat16* residual, void* y, int M, int J, float epsilon, float cap) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, first = warp * PART + lane % 4 * 8, j = blockIdx.x * OUTPUTS;
  uint4* w = (uint4*)memory + warp * 4 * ROWS + lane;  // [CHUNKS, TILES_OF_W, SIDES, SLOTS]
#if EARLY
  let_next_begin();
#endif
#pragma unroll
  for (int m = 0; m < TILES_OF_W; m++) {
    const int output = j + m * STEP + group;
    const bfloat16* low = weight + (int64)min(output, J - 1) * INPUTS + first;
    const bfloat16* high = weight + (int64)(GATED ? J + min(output, J - 1) : min(output + 8, J - 1)) * INPUTS + first;
    if (group < ROWS)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        copy_16(w + (c * TILES_OF_W + m) * SIDES * SLOTS, low + c * 32, true);
        if (SIDES == 2) copy_16(w + ((c * TILES_OF_W + m) * 2 + 1) * SLOTS, high + c * 32, true);
      }
  }
#if EARLY
  wait_for_kernel_before();
#endif
  uint4 of_x[CHUNKS][TILES];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      of_x[c][n] = {0, 0, 0, 0};
      if (n * 8 + group < M) of_x[c][n] = *(const uint4*)(x + (int64)(n * 8 + group) * INPUTS + first + c * 32);
    }
  copies_done();
  float sums[TILES_OF_W][TILES][4] = {}, squares[TILES] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
      if (NORM) squares[n] += (square(of_x[c][n].x) + square(of_x[c][n].y)) + (square(of_x[c][n].z) + square(of_x[c][n].w));
#pragma unroll
    for (int m = 0; m < TILES_OF_W; m++) {
      uint4 one = {0, 0, 0, 0}, other = {0, 0, 0, 0};
      if (group < ROWS) {
        one = w[(c * TILES_OF_W + m) * SIDES * SLOTS];
        if (SIDES == 2) other = w[((c * TILES_OF_W + m) * 2 + 1) * SLOTS];
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        multiply_add(sums[m][n], one.x, other.x, one.y, other.y, of_x[c][n].x, of_x[c][n].y);
        multiply_add(sums[m][n], one.z, other.z, one.w, other.w, of_x[c][n].z, of_x[c][n].w);
      }
    }
  }

  // sums[m][n]: (output group, rows 2 t and 2 t + 1 of the tile), then (output group + 8, the same), t = lane % 4; squares[n]: of row `group`.
  __syncthreads();  // the weights' memory has room for them
  float *shared = (float*)memory, *shared_squares = shared + WARPS * TILES_OF_W * TILES * 128;
#pragma unroll
  for (int n = 0; n < TILES; n++) {
#pragma unroll
    for (int m = 0; m < TILES_OF_W; m++)
      *(float4*)(shared + ((warp * TILES_OF_W + m) * TILES + n) * 128 + lane * 4) = make_float4(sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]);
    if (NORM) {
      squares[n] += shuffle_xor(squares[n], 1);
      squares[n] += shuffle_xor(squares[n], 2);
      if (lane % 4 == 0) shared_squares[warp * TILES * 8 + n * 8 + group] = squares[n];
    }
  }
  __syncthreads();
  constexpr int EACH = SIDES == 1 || GATED ? 2 : 4;
  for (int i = threadIdx.x; i < TILES_OF_W * TILES * 32 * EACH; i += THREADS) {
    const int tile = i / (32 * EACH), n = tile % TILES, m = tile / TILES, of = i / EACH % 32, which = i % EACH;
    const int row = n * 8 + of % 4 * 2 + which % 2, output = j + m * STEP + of / 4 + which / 2 * 8;
    if (row >= M || output >= J || (GATED && of / 4 >= ROWS)) continue;
    float a = 0, b = 0, norm = 1;
    for (int warp = 0; warp < WARPS; warp++) {
      a += shared[((warp * TILES_OF_W + m) * TILES + n) * 128 + of * 4 + which];
      if (GATED) b += shared[((warp * TILES_OF_W + m) * TILES + n) * 128 + of * 4 + 2 + which];
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
