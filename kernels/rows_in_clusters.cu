// A product of up to ROWS rows with a weight [outputs, INPUTS], bfloat16, with what stands around it in a block (kernels/rows.py): for more rows than
// `rows.cu` takes. What takes time then, beside the weight's bytes, is that every program reads the rows anew: so a program has many outputs, OUTPUTS rows of
// the weight, GATED half of them of either half, and the CLUSTER of programs that has them shares the inputs. Weights and rows come to shared memory in PIECES
// of the program's inputs, BUFFERS at a time, the first weights, with EARLY, before the kernel before has ended. The programs' sums are added up in the order
// of the inputs, by each for its share of the rows, out of the others' shared memory.
//
// A warp has a part of OUTPUT_WARPS of the outputs and of INPUT_WARPS of a piece's inputs.
constexpr int PART = INPUTS / CLUSTER, PIECE = PART / PIECES, THREADS = 32 * OUTPUT_WARPS * INPUT_WARPS;
constexpr int M_TILES = OUTPUTS / 16 / OUTPUT_WARPS, N_TILES = ROWS / 8, CHUNKS = PIECE / INPUT_WARPS / 32;
constexpr int PITCH = OUTPUTS + 4, HAS = GATED ? OUTPUTS / 2 : OUTPUTS;
static_assert(PIECE % 64 == 0 && CHUNKS * INPUT_WARPS * 32 * PIECES * CLUSTER == INPUTS);
static_assert(M_TILES * OUTPUT_WARPS * 16 == OUTPUTS && N_TILES * 8 == ROWS && ROWS % CLUSTER == 0 && (BUFFERS > 1 || PIECES == 1));

// Where in a row of shared memory its `eight`th 8 inputs lie, so that the same 8 of 8 rows in line lie in different banks.
DEVICE int place(int row, int eight) { return (eight ^ row % 8) * 8; }

// Rows of LENGTH inputs to shared memory, 8 threads a row; `from(row)`: where one begins, or nullptr for zeros.
template <int COUNT, int LENGTH, class From>
DEVICE void copy_rows(bfloat16* to, From from, const bfloat16* somewhere) {
  const int eight = threadIdx.x % 8;
#pragma unroll 4
  for (int row = threadIdx.x / 8; row < COUNT; row += THREADS / 8) {
    const bfloat16 *first = from(row), *its = first ? first + eight * 8 : somewhere;
    bfloat16* its_place = to + row * LENGTH + place(row, eight);
#pragma unroll
    for (int i = 0; i < LENGTH; i += 64) copy_16(its_place + i, its + i, first);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, PROGRAMS)
rows(const bfloat16* x, const bfloat16* __restrict__ weight, const bfloat16* residual, void* y, int M, int J, float epsilon, float cap) {
  const int rank = blockIdx.x % CLUSTER, j = blockIdx.x / CLUSTER * HAS, input = rank * PART;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, t = lane % 4, matrix = lane / 8, row_of_it = lane % 8;
  const int of_inputs = warp % INPUT_WARPS, of_outputs = warp / INPUT_WARPS;
  auto slot = [](int piece) { return (bfloat16*)memory + piece % BUFFERS * (OUTPUTS + ROWS) * PIECE; };  // [BUFFERS, OUTPUTS + ROWS, PIECE]
  auto copy_w = [=](int piece) {
    copy_rows<OUTPUTS, PIECE>(slot(piece), [=](int row) {
      const int output = GATED ? j + row / 16 * 8 + row % 8 : j + row;
      return output < J ? weight + (int64)(GATED && row % 16 >= 8 ? J + output : output) * INPUTS + input + piece * PIECE : nullptr;
    }, weight);
  };
  auto copy_x = [=](int piece) {
    copy_rows<ROWS, PIECE>(slot(piece) + OUTPUTS * PIECE, [=](int row) {
      return row < M ? x + (int64)row * INPUTS + input + piece * PIECE : nullptr;
    }, x);
    end_of_group();
  };
#if EARLY
  let_next_begin();
#endif
  for (int piece = 0; piece < BUFFERS; piece++) copy_w(piece);
#if EARLY
  wait_for_kernel_before();
#endif
  for (int piece = 0; piece < BUFFERS; piece++) copy_x(piece);

  float sums[M_TILES][N_TILES][4] = {}, squares[N_TILES] = {};
  for (int piece = 0; piece < PIECES; piece++) {
    if (piece == 0) groups_done_but<BUFFERS - 1>();
    else groups_done_but<(BUFFERS > 1 ? BUFFERS - 2 : 0)>();
    __syncthreads();
    if (piece > 0) {  // all are done with the piece before
      if (piece - 1 + BUFFERS < PIECES) copy_w(piece - 1 + BUFFERS), copy_x(piece - 1 + BUFFERS);
      else end_of_group();
    }
    const bfloat16* its_w = slot(piece) + (of_outputs * M_TILES * 16 + matrix % 2 * 8 + row_of_it) * PIECE;
    const bfloat16* its_x = slot(piece) + (OUTPUTS + row_of_it) * PIECE;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int eight = (of_inputs * CHUNKS + c) * 4, in_w = eight + matrix / 2;
      unsigned of_x[N_TILES][4];
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        load_matrices(of_x[n], its_x + n * 8 * PIECE + place(row_of_it, eight + matrix));
        if (NORM && of_outputs == 0) squares[n] += (square(of_x[n][0]) + square(of_x[n][1])) + (square(of_x[n][2]) + square(of_x[n][3]));
      }
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        unsigned first[4], second[4];  // of 32 inputs, by 16
        load_matrices(first, its_w + m * 16 * PIECE + place(row_of_it, in_w));
        load_matrices(second, its_w + m * 16 * PIECE + place(row_of_it, in_w + 2));
#pragma unroll
        for (int n = 0; n < N_TILES; n++) multiply_add(sums[m][n], first[0], first[1], first[2], first[3], of_x[n][0], of_x[n][1]);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) multiply_add(sums[m][n], second[0], second[1], second[2], second[3], of_x[n][2], of_x[n][3]);
      }
    }
  }
  __syncthreads();

  // sums[m][n]: (output group, rows 2 t and 2 t + 1 of the tile), then (output group + 8, the same); squares[n]: of row `group`.
  float *shared = (float*)memory, *shared_squares = shared + INPUT_WARPS * ROWS * PITCH;  // [INPUT_WARPS, ROWS, PITCH]; [INPUT_WARPS, ROWS]
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const int row = of_inputs * ROWS + n * 8;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) shared[(row + t * 2 + i % 2) * PITCH + (of_outputs * M_TILES + m) * 16 + group + i / 2 * 8] = sums[m][n][i];
    if (NORM) {
      squares[n] += shuffle_xor(squares[n], 1);
      squares[n] += shuffle_xor(squares[n], 2);
      if (of_outputs == 0 && t == 0) shared_squares[row + group] = squares[n];
    }
  }
  if (INPUT_WARPS > 1) {
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * PITCH / 4; i += THREADS) {
      float4 sum = ((float4*)shared)[i];
#pragma unroll
      for (int k = 1; k < INPUT_WARPS; k++) {
        const float4 more = ((float4*)shared)[k * ROWS * PITCH / 4 + i];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      ((float4*)shared)[i] = sum;
    }
    if (NORM && threadIdx.x < ROWS)
      for (int k = 1; k < INPUT_WARPS; k++) shared_squares[threadIdx.x] += shared_squares[k * ROWS + threadIdx.x];
  }
  begin_wait_for_cluster();
  wait_for_cluster();
  for (int i = threadIdx.x; i < ROWS / CLUSTER * (HAS / 4); i += THREADS) {
    const int row = rank + CLUSTER * (i / (HAS / 4)), four = i % (HAS / 4) * 4, output = j + four;
    if (row >= M || output >= J) continue;
    float a[4] = {}, b[4] = {}, norm = 1, sum = 0;
#pragma unroll
    for (int program = 0; program < CLUSTER; program++) {
      const float4* its = (const float4*)(shared + row * PITCH + (GATED ? four / 8 * 16 + four % 8 : four));
      const float4 more = read_of(program, its);
      a[0] += more.x, a[1] += more.y, a[2] += more.z, a[3] += more.w;
      if (GATED) {
        const float4 more = read_of(program, its + 2);
        b[0] += more.x, b[1] += more.y, b[2] += more.z, b[3] += more.w;
      }
      if (NORM) sum += read_of(program, shared_squares + row);
    }
    if (NORM) norm = 1 / sqrtf(sum / INPUTS + epsilon);
    const int64 at = (int64)row * J + output;
    alignas(8) bfloat16 narrow[4];
    float added[4] = {};
    const bool all = J % 4 == 0;
    if (residual) {
      if (all) *(uint2*)narrow = *(const uint2*)(residual + at);
      for (int k = 0; k < 4; k++)
        if (all) added[k] = to_float(narrow[k]);
        else if (output + k < J) added[k] = to_float(residual[at + k]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      a[k] *= norm, b[k] *= norm;
      if (GATED) a[k] *= b[k] / (1 + expf(-a[k]));
      a[k] += added[k];
      if (CAP) a[k] = cap * tanhf(a[k] / cap);
      narrow[k] = to_bfloat16(a[k]);
    }
    if (all && WIDE) *(float4*)((float*)y + at) = make_float4(a[0], a[1], a[2], a[3]);
    else if (all) *(uint2*)((bfloat16*)y + at) = *(uint2*)narrow;
    else
      for (int k = 0; k < 4 && output + k < J; k++)
        if (WIDE) ((float*)y)[at + k] = a[k];
        else ((bfloat16*)y)[at + k] = narrow[k];
  }
  begin_wait_for_cluster();  // nobody ends while another reads of its memory
  wait_for_cluster();
}
