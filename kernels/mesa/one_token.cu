// Mesa's one-token step for keys and values of 128 (kernels/mesa/one_token.py): a program of 128 threads has a head. H lies in registers: a thread has
// 4 columns and every fourth row of it, so that a product is 128 multiply-adds, 8 loads of what all need, and 3 shuffles. G comes to shared memory meanwhile.
//
// With EARLY the program begins while the kernel before it ends: states are older than that.
//
// A step of conjugate gradients waits for its sums once: p'Ap, r'Ap, |Ap|^2 and |r|^2 are taken together, and the next |r|^2 follows from them; where it
// falls so far that it would be rounding, it is taken anew.
constexpr int K = 128, ROWS = 32, PAD = 36;  // PAD: of 32 numbers, so that the four groups of rows read other banks
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

// Sums over all threads, for all of them. `shared` [4 N] is nobody's from the barrier before on.
template <int N>
DEVICE void sums(float (&x)[N], float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int mask = 16; mask; mask /= 2)
    for (int n = 0; n < N; n++) x[n] += shuffle_xor(x[n], mask);
  if (lane == 0)
    for (int n = 0; n < N; n++) shared[warp * N + n] = x[n];
  __syncthreads();
  for (int n = 0; n < N; n++) x[n] = (shared[n] + shared[N + n]) + (shared[2 * N + n] + shared[3 * N + n]);
}

DEVICE float sum(float x, float* shared) {
  float all[1] = {x};
  sums(all, shared);
  return all[0];
}

DEVICE float largest(float x, float* shared) {
  for (int mask = 16; mask; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3]));
}

// Of partial sums of 4 columns the own one's, over the 4 threads of a warp that share them.
DEVICE float own(float4 y, int group) {
  const bool high = group & 2, odd = group & 1;
  float a = high ? y.z : y.x, b = high ? y.w : y.y;
  a += shuffle_xor(high ? y.x : y.z, 16);
  b += shuffle_xor(high ? y.y : y.w, 16);
  return (odd ? b : a) + shuffle_xor(odd ? a : b, 8);
}

DEVICE void add(float4& y, float a, float4 x) {
  y.x += a * x.x, y.y += a * x.y, y.z += a * x.z, y.w += a * x.w;
}

DEVICE void multiply(float4& x, float a) { x.x *= a, x.y *= a, x.z *= a, x.w *= a; }

// H x, each thread's column of x and of the product.
DEVICE float times(const float4 (&h)[ROWS], float x, float* vector, int at, int group) {
  vector[at] = x;
  __syncthreads();
  float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < ROWS; n += 4) {
    const float4 p = *(const float4*)(vector + group * PAD + n);
    add(y, p.x, h[n]), add(y, p.y, h[n + 1]), add(y, p.z, h[n + 2]), add(y, p.w, h[n + 3]);
  }
  return own(y, group);
}

// Nothing is __restrict__: what is, may be read before the kernel before has ended.
extern "C" __global__ void __launch_bounds__(128, PROGRAMS)
mesa_step(const number* q, const number* k, const number* v, const float* log_decay, const float* beta, const float* sign, const float* lam,
     const float* G, const float* S, const int* segment, const int* last, number* o, float* G_end, float* S_end, int* last_end, int* taken, float* residual, int heads,
     int steps, float eps, int both, int start, float norm_epsilon) {
  float4* shared_G = memory;                         // [128 rows, 32]
  float* vectors = (float*)(memory + K * K / 4);     // p, then x; k; sums
  float *vector = vectors, *keys = vectors + 4 * PAD, *some = vectors + 8 * PAD, *others = some + 16;
  const int lane = threadIdx.x % 32, group = lane / 8, first = threadIdx.x / 32 * 32 + lane % 8 * 4, j = first + group;
  const int at = j % 4 * PAD + j / 4;
  const int bh = blockIdx.x, b = bh / heads;
  const int64 here = (int64)bh * K * K;
  G += here, S += here, G_end += here, S_end += here;
  float4 h[ROWS];
#pragma unroll
  for (int n = 0; n < ROWS; n++) h[n] = *(const float4*)(S + (n * 4 + group) * K + first);
  const float corner = S[j * K + j];
#pragma unroll
  for (int n = 0; n < ROWS; n++) copy_16(shared_G + (n * 4 + group) * 32 + first / 4, G + (n * 4 + group) * K + first, true);
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

  keys[at] = k_j;
  const float most = largest(fabsf(q_j), some);
  float b_j = q_j / (most > 0 ? most : 1.f);
  const float norm = sqrtf(sum(b_j * b_j, others));
  b_j /= norm > 0 ? norm : 1.f;

  float4 column = make_float4(keys[first / 4], keys[PAD + first / 4], keys[2 * PAD + first / 4], keys[3 * PAD + first / 4]);
  multiply(column, write);
#pragma unroll
  for (int n = 0; n < ROWS; n += 4) {
    const float4 row = *(const float4*)(keys + group * PAD + n);
    const float of_row[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      if (keep == 0) h[n + m] = make_float4(0, 0, 0, 0);
      multiply(h[n + m], keep);
      add(h[n + m], of_row[m], column);
      *(float4*)(S_end + ((n + m) * 4 + group) * K + first) = h[n + m];
    }
  }
  const float diagonal = (keep == 0 ? 0.f : keep * corner) + write * k_j * k_j + lam_j;

  float x = start == 2 ? b_j : start == 1 && diagonal > 0 ? b_j / diagonal : 0.f;
  float r = b_j - times(h, x, vector, at, group) - lam_j * x;
  float p = r, square = sum(r * r, some);
  const float begin = sqrtf(square), wanted = fmaxf(eps * (both ? fminf(begin, 1.f) : begin), SMALLEST), limit = wanted * wanted;
  bool going = most > 0 && square > limit;
  int count = 0;
  while (going && count < steps) {
    const float Ap = times(h, p, vector, at, group) + lam_j * p;
    float all[4] = {p * Ap, r * Ap, Ap * Ap, r * r};
    sums(all, some);
    going = all[0] > 0;
    const float alpha = going ? all[3] / all[0] : 0.f;
    x += alpha * p;
    r -= alpha * Ap;
    float now = all[3] - alpha * (2 * all[1] - alpha * all[2]);
    if (now < all[3] * FALL) now = sum(r * r, others);
    p = r + now / all[3] * p;
    count += going;
    going = going && now > limit;
  }
  const float left = b_j - times(h, x, vector, at, group) - lam_j * x;
  x *= most * norm;
  float ends[2] = {left * left, x * k_j};
  copies_done();
  sums(ends, some);
  if (threadIdx.x == 0) {
    taken[bh] = padding ? 0 : count;
    residual[bh] = padding ? 0.f : sqrtf(ends[0]);
  }

  vector[at] = x;
  const number* values = v + bh * K + first;
  const float4 written = make_float4(write * of(values[0]), write * of(values[1]), write * of(values[2]), write * of(values[3]));
  __syncthreads();
  float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < ROWS; n += 4) {
    const float4 row = *(const float4*)(keys + group * PAD + n), by = *(const float4*)(vector + group * PAD + n);
    const float of_row[4] = {row.x, row.y, row.z, row.w}, of_x[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      float4 g = shared_G[((n + m) * 4 + group) * 32 + first / 4];
      if (keep == 0) g = make_float4(0, 0, 0, 0);
      multiply(g, keep);
      add(y, of_x[m], g);
      add(g, of_row[m], written);
      *(float4*)(G_end + ((n + m) * 4 + group) * K + first) = g;
    }
  }
  float read = own(y, group) + ends[1] * write * v_j;
  if (norm_epsilon >= 0) read /= sqrtf(sum(read * read, others) / K + norm_epsilon);
  o[bh * K + j] = to(padding ? 0.f : read);
}
