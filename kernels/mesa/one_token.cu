// Mesa's one-token step for keys and values of 128 (kernels/mesa/one_token.py): a program of 128 threads has a head. H comes to shared memory and goes from
// there to registers; G comes to shared memory while H is solved with, beside H (APART: two programs a processor), or in its place (three).
//
// Of H the lower triangle is read, in blocks of 16, and written. In registers all of it lies: a thread has 4 columns, and of every 16 rows 4, so that a
// product is 128 multiply-adds, 8 loads of what all need, and 3 shuffles. In shared memory a block of 4 x 4 numbers lies where rows of 8 blocks as well as
// columns of them are in other banks.
//
// With EARLY the program begins while the kernel before it ends: states are older than that.
//
// A step of conjugate gradients waits for its sums once: p'Ap, r'Ap, |Ap|^2 and |r|^2 are taken together, and the next |r|^2 follows from them; where it
// falls so far that it would be rounding, it is taken anew.
constexpr int K = 128, ROWS = 32, TRIANGLE = 2560;  // of H's triangle, in 16 bytes: 10 squares of 32
constexpr float SMALLEST = 1.1920929e-7f, FALL = 1.f / 1024;
#if BFLOAT
typedef bfloat16 number;
DEVICE float of(number x) { return to_float(x); }
DEVICE number to(float x) { return to_bfloat16(x); }
#else
typedef float number;
DEVICE float of(number x) { return x; }
DEVICE number to(float x) { return x; }
#endif

// Of four sums the own one's, a group's, over the 4 threads of a warp that are alike but for their group.
DEVICE float own(float4 y, int group) {
  const bool high = group & 2, odd = group & 1;
  float a = high ? y.z : y.x, b = high ? y.w : y.y;
  a += shuffle_xor(high ? y.x : y.z, 16);
  b += shuffle_xor(high ? y.y : y.w, 16);
  return (odd ? b : a) + shuffle_xor(odd ? a : b, 8);
}

// Sums over all threads, for all of them. `shared` [16] is nobody's from the barrier before on.
DEVICE float4 sums(float4 x, float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float mine = own(x, lane / 8);
  for (int mask = 4; mask; mask /= 2) mine += shuffle_xor(mine, mask);
  if (lane % 8 == 0) shared[warp * 4 + lane / 8] = mine;
  __syncthreads();
  const float4 *of = (const float4*)shared, a = of[0], b = of[1], c = of[2], d = of[3];
  return make_float4(a.x + b.x + (c.x + d.x), a.y + b.y + (c.y + d.y), a.z + b.z + (c.z + d.z), a.w + b.w + (c.w + d.w));
}

DEVICE float sum(float x, float* shared) {
  for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return shared[0] + shared[1] + (shared[2] + shared[3]);
}

DEVICE float largest(float x, float* shared) {
  for (int mask = 16; mask; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3]));
}

DEVICE void add(float4& y, float a, float4 x) {
  y.x += a * x.x, y.y += a * x.y, y.z += a * x.z, y.w += a * x.w;
}

DEVICE void multiply(float4& x, float a) { x.x *= a, x.y *= a, x.z *= a, x.w *= a; }

// As much of x as is kept: of what is dropped nothing, whatever it was.
DEVICE float kept(float x, float keep) { return keep == 0 ? 0.f : keep * x; }
DEVICE void keep_of(float4& x, float keep) { x = make_float4(kept(x.x, keep), kept(x.y, keep), kept(x.z, keep), kept(x.w, keep)); }

// Where the first of four rows of a block lies, those of 4 `row` and 4 `column` <= `row`; the next ones lie a `pitch` further each, all in 16 bytes.
DEVICE unsigned pitch(unsigned row) { return 8 * (row / 8 + 1); }
DEVICE unsigned place(unsigned row, unsigned column) { return (row / 8 * 16 + row % 8 * 4) * pitch(row) + (column ^ row % 8); }

DEVICE void ask(float4* to, const float* from, unsigned row, unsigned column) {
  copy_16(to + place(row / 4, column) + row % 4 * pitch(row / 4), from + row * K + 4 * column, true);
}

// H's triangle to shared memory: of squares of 32 those below the diagonal, and of those on it three quarters.
DEVICE void ask_for_triangle(float4* to, const float* H) {
  const unsigned t = threadIdx.x;
#pragma unroll
  for (int row = 0; row < 128; row += 16)
#pragma unroll
    for (int column = 0; column + 16 <= row; column += 32) ask(to, H, row + t / 8, column / 4 + t % 8);
#pragma unroll
  for (int row = 0; row < 128; row += 64) ask(to, H, row + t / 64 * 32 + t % 64 / 4, row / 4 + t / 64 * 8 + t % 4);
}

DEVICE void choose(float& above, float& below, bool is_above, bool is_below) {
  const float up = above, low = below;
  above = is_below ? up : low;
  below = is_above ? up : low;
}

// The whole H, of which thread has blocks 4 n + group of the rows and `column` of the columns. What lies above the diagonal in shared memory is not used.
DEVICE void take(float4 (&h)[ROWS], const float4* triangle, unsigned group, unsigned column) {
#pragma unroll
  for (int n = 0; n < ROWS / 4; n++) {
    const unsigned row = 4 * n + group;
    const bool above = row < column, below = row > column;
    const float4* block = triangle + (above ? place(column, row) : place(row, column));
    const unsigned next = pitch(above ? column : row);
    float4 &a = h[4 * n], &b = h[4 * n + 1], &c = h[4 * n + 2], &d = h[4 * n + 3];
    a = block[0], b = block[next], c = block[2 * next], d = block[3 * next];
    choose(a.y, b.x, above, below), choose(a.z, c.x, above, below), choose(a.w, d.x, above, below);
    choose(b.z, c.y, above, below), choose(b.w, d.y, above, below), choose(c.w, d.z, above, below);
  }
}

// H x, each thread's column of x and of the product.
DEVICE float times(const float4 (&h)[ROWS], float x, float* vector, int j, int group) {
  vector[j] = x;
  __syncthreads();
  float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < ROWS; n += 4) {
    const float4 p = *(const float4*)(vector + 4 * (n + group));
    add(y, p.x, h[n]), add(y, p.y, h[n + 1]), add(y, p.z, h[n + 2]), add(y, p.w, h[n + 3]);
  }
  return own(y, group);
}

// Nothing is __restrict__: what is, may be read before the kernel before has ended.
extern "C" __global__ void __launch_bounds__(128, APART ? 2 : 3)
mesa_step(const number* q, const number* k, const number* v, const float* log_decay, const float* beta, const float* sign, const float* lam,
     const float* G, const float* S, const int* segment, const int* last, number* o, float* G_end, float* S_end, int* last_end, int* taken, float* residual, int heads,
     int steps, float eps, int both, int start, float norm_epsilon, int whole) {
  float4 *shared_G = memory, *triangle = memory + APART * K * K / 4;  // [128 rows, 32]
  float *vector = (float*)(memory + K * K / 4 + APART * TRIANGLE), *keys = vector + K, *values = keys + K, *some = values + K, *others = some + 16;
  const unsigned lane = threadIdx.x % 32, group = lane / 8, first = threadIdx.x / 32 * 32 + lane % 8 * 4, j = first + group;
  const int bh = blockIdx.x, b = bh / heads;
  const int64 states = (int64)bh * K * K, mine = states + 4 * group * K + first;  // the thread's numbers: 4 rows of every 16 from here on
  G += mine, G_end += mine, S_end += mine, shared_G += group * K + first / 4;

  auto ask_for_G = [&] {
#pragma unroll
    for (int n = 0; n < ROWS; n++) copy_16(shared_G + (n / 4 * 16 + n % 4) * 32, G + (n / 4 * 16 + n % 4) * K, true);
    end_of_group();
  };
  ask_for_triangle(triangle, S + states);
  end_of_group();
  if (APART) ask_for_G();
  groups_done_but<APART>();
  __syncthreads();
  float4 h[ROWS];
  take(h, triangle, group, first / 4);
  const float corner = ((const float*)(triangle + place(j / 4, j / 4) + j % 4 * pitch(j / 4)))[j % 4];
  if (!APART) {
    __syncthreads();  // H is read
    ask_for_G();
  }
#if EARLY
  wait_for_kernel_before();
  let_next_begin();
#endif
  const float q_j = of(q[bh * K + j]), k_j = of(k[bh * K + j]), v_j = of(v[bh * K + j]), lam_j = lam[bh % heads * K + j];
  int id = last[b];
  float keep = expf(log_decay[bh]) * (sign ? sign[bh] : 1.f), write = beta[bh];
  bool padding = false;
  if (segment) {
    const int its = segment[b];
    padding = its < 0;
    if (padding) keep = 1, write = 0;
    else {
      if (id >= 0 && its != id) keep = 0;
      id = its;
    }
  } else if (id < 0) id = 0;
  if (bh % heads == 0 && threadIdx.x == 0) last_end[b] = id;

  keys[j] = k_j, values[j] = v_j;
  const float most = largest(fabsf(q_j), some);
  float b_j = q_j / (most > 0 ? most : 1.f);
  const float norm = sqrtf(sum(b_j * b_j, others));
  b_j /= norm > 0 ? norm : 1.f;

  const unsigned first_told = whole ? 0 : first / 16 * 16;
  float4 column = *(const float4*)(keys + first);
  multiply(column, write);
#pragma unroll
  for (int n = 0; n < ROWS; n += 4) {
    const float4 row = *(const float4*)(keys + 4 * (n + group));
    const float of_row[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      keep_of(h[n + m], keep);
      add(h[n + m], of_row[m], column);
      if (first_told <= n * 4) *(float4*)(S_end + (4 * n + m) * K) = h[n + m];
    }
  }
  const float diagonal = kept(corner, keep) + write * k_j * k_j + lam_j;

  float x = start == 2 ? b_j : start == 1 && diagonal > 0 ? b_j / diagonal : 0.f;
  float r = b_j - times(h, x, vector, j, group) - lam_j * x;
  float p = r, square = sum(r * r, some);
  const float begin = sqrtf(square), wanted = fmaxf(eps * (both ? fminf(begin, 1.f) : begin), SMALLEST), limit = wanted * wanted;
  bool going = most > 0 && square > limit;
  int count = 0;
  while (going && count < steps) {
    const float Ap = times(h, p, vector, j, group) + lam_j * p;
    const float4 all = sums(make_float4(p * Ap, r * Ap, Ap * Ap, r * r), some);
    going = all.x > 0;
    const float alpha = going ? all.w / all.x : 0.f;
    x += alpha * p;
    r -= alpha * Ap;
    float now = all.w - alpha * (2 * all.y - alpha * all.z);
    if (now < all.w * FALL) now = sum(r * r, others);
    p = r + now / all.w * p;
    count += going;
    going = going && now > limit;
  }
  const float left = b_j - times(h, x, vector, j, group) - lam_j * x;
  x *= most * norm;
  const float4 ends = sums(make_float4(left * left, x * k_j, 0, 0), some);
  if (threadIdx.x == 0) {
    taken[bh] = padding ? 0 : count;
    residual[bh] = padding ? 0.f : sqrtf(ends.x);
  }

  vector[j] = x;
  float4 written = *(const float4*)(values + first);
  multiply(written, write);
  groups_done_but<0>();  // of G each thread reads what it asked for itself
  __syncthreads();
  float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < ROWS; n += 4) {
    const float4 row = *(const float4*)(keys + 4 * (n + group)), by = *(const float4*)(vector + 4 * (n + group));
    const float of_row[4] = {row.x, row.y, row.z, row.w}, of_x[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      float4 g = shared_G[(4 * n + m) * 32];
      keep_of(g, keep);
      add(y, of_x[m], g);
      add(g, of_row[m], written);
      *(float4*)(G_end + (4 * n + m) * K) = g;
    }
  }
  float read = own(y, group) + ends.y * write * v_j;
  if (norm_epsilon >= 0) read /= sqrtf(sum(read * read, others) / K + norm_epsilon);
  o[bh * K + j] = to(padding ? 0.f : read);
}
