// What outputs.cu and gradients.cu have in common: a program has 32 values of a head, a warp a group of keys, a thread a value. A block's numbers
// are copied to shared memory while the block before it is at work.
//
// Constants: H, K, V, S (tokens of a block), C (of a chunk), GROUPS (warps of a program), RESIDENT (programs of a processor), AT_HAND (blocks in
// shared memory, two where there is room).

constexpr int LANES = 32, THREADS = LANES * GROUPS, QUADS = S / 4;
constexpr int TABLE = K * 3 * S;           // [K, (k, k^2 / 2, q), S]: what all threads of a warp read
constexpr bool WHOLE = V % LANES == 0;     // else values are read from where they are, as their rows need not begin at 16 bytes
constexpr int GATES = 4 * S;               // [(1 / c, taken, prior / c, rest), S], see `spread_kernel` in triton.py

DEVICE float decayed(float x, float decay) { return decay > 0.f ? decay * x : 0.f; }

// Of COUNT things the program's threads take one after another: a loop whose every step is known.
#define SHARED_OUT(i, COUNT)                                                              \
  _Pragma("unroll") for (int step = 0, i = threadIdx.x; step * THREADS < COUNT; step++, i += THREADS) \
    if ((step + 1) * THREADS <= COUNT || i < COUNT)

template <int COUNT>
DEVICE void copy(float* to, const float* from) {
  SHARED_OUT(i, COUNT / 4) copy_16(to + i * 4, from + i * 4, true);
}

// [S, 32] of rows that lie H V apart; zeros behind the first `there`.
template <class X>
DEVICE void copy_tokens(X* to, const X* from, int there) {
  constexpr int AT_ONCE = 16 / sizeof(X), PARTS = LANES / AT_ONCE;
  SHARED_OUT(i, S * PARTS) {
    const int t = i / PARTS;
    copy_16(to + i * AT_ONCE, from + (t < there ? t * (H * V) : 0) + i % PARTS * AT_ONCE, t < there);
  }
}

// Four tokens' numbers of a key, the same for all threads.
struct Quad {
  float k[4], half_kk[4], q[4];

  static DEVICE void put(float (&to)[4], float4 x) { to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w; }

  DEVICE Quad(const float* key, int quad) {
    const float4* at = (const float4*)key + quad;
    put(k, at[0]);
    put(half_kk, at[QUADS]);
    put(q, at[2 * QUADS]);
  }
};
