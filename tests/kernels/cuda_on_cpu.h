// What kernels/card.cuh says, on a CPU: a thread for a thread; warps, programs and clusters of programs that wait for each other at barriers.
// Uninitialised shared memory is NaN; tensor cores round their operands to tf32 as a card does, by cutting bits off.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

typedef unsigned short bfloat16;
typedef long long int64;
#define DEVICE inline
#define __global__
#define __restrict__
#define __shared__
#define __launch_bounds__(threads, programs)
#define __cluster_dims__(x, y, z)
#define __syncthreads() here->all.arrive_and_wait()
#ifndef CLUSTER
#define CLUSTER 1
#endif

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
using std::max;
using std::min;
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Place {
  int x, y;
};
static thread_local Place threadIdx, blockIdx;
static Place gridDim;

struct Program {
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  float told[32][32][6];  // what a warp's threads tell each other
  unsigned told_bits[32][32][6];
  const bfloat16* told_where[32][32];
  float4 shared[SHARED_BYTES / 16];
  Program(int threads) : all(threads) {
    for (int warp = 0; warp < threads / 32; warp++) warps.push_back(std::make_unique<std::barrier<>>(32));
    for (auto& m : shared) m.x = m.y = m.z = m.w = std::numeric_limits<float>::quiet_NaN();
  }
};
static std::barrier<>* cluster_waits;
static std::vector<std::unique_ptr<Program>> cluster;
static thread_local Program* here;
static thread_local float4* memory;

DEVICE void wait_for_warp() { here->warps[threadIdx.x / 32]->arrive_and_wait(); }

DEVICE float cut(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  bits &= 0xffffe000u;
  memcpy(&x, &bits, 4);
  return x;
}

DEVICE float reciprocal(float x) { return 1.f / x; }

DEVICE float shuffle_xor(float x, int mask) {
  auto& of = here->told[threadIdx.x / 32];
  wait_for_warp();
  of[threadIdx.x % 32][0] = x;
  wait_for_warp();
  return of[threadIdx.x % 32 ^ mask][0];
}

DEVICE void multiply_add(float (&d)[4], const float (&a)[4], float b0, float b1) {
  auto& of = here->told[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  wait_for_warp();
  for (int i = 0; i < 4; i++) of[lane][i] = cut(a[i]);
  of[lane][4] = cut(b0);
  of[lane][5] = cut(b1);
  wait_for_warp();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8; k++) d[i] += of[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2] * of[column * 4 + k % 4][4 + k / 4];
  }
}

// Copies are made as late as they may be: when their thread waits for them.
struct Copy {
  void* to;
  const void* from;
};
static thread_local std::vector<std::vector<Copy>> asked;  // by group, the last one still open
DEVICE void copy_16(void* to, const void* from, bool is_there) {
  if (asked.empty()) asked.emplace_back();
  asked.back().push_back({to, is_there ? from : nullptr});
}
DEVICE void make(const std::vector<Copy>& group) {
  for (const auto& [to, from] : group) from ? memcpy(to, from, 16) : memset(to, 0, 16);
}
DEVICE void copies_done() {
  for (const auto& group : asked) make(group);
  asked.clear();
}
DEVICE void end_of_group() {
  if (asked.empty()) asked.emplace_back();
  asked.emplace_back();
}
template <int N>
DEVICE void groups_done_but() {
  for (; asked.size() > N + 1; asked.erase(asked.begin())) make(asked.front());
}

static thread_local std::unique_ptr<std::barrier<>::arrival_token> arrived;
DEVICE void begin_wait_for_cluster() { arrived = std::make_unique<std::barrier<>::arrival_token>(cluster_waits->arrive()); }
DEVICE void wait_for_cluster() { cluster_waits->wait(std::move(*arrived)); }
template <class T>
DEVICE T read_of(int program, const T* mine) {
  return *(const T*)((const char*)cluster[program]->shared + ((const char*)mine - (const char*)memory));
}


// Kernels run one after another here.
DEVICE void wait_for_kernel_before() {}
DEVICE void let_next_begin() {}

DEVICE float to_float(bfloat16 x) {
  const unsigned bits = (unsigned)x << 16;
  float r;
  memcpy(&r, &bits, 4);
  return r;
}

DEVICE bfloat16 to_bfloat16(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

DEVICE void multiply_add(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  auto& of = here->told_bits[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  wait_for_warp();
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) of[lane][i] = mine[i];
  wait_for_warp();
  auto half = [](unsigned x, int k) { return to_float((bfloat16)(k % 2 ? x >> 16 : x & 0xffff)); };
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) d[i] += half(of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k) * half(of[column * 4 + k % 8 / 2][4 + k / 8], k);
  }
}

DEVICE void load_matrices(unsigned (&r)[4], const bfloat16* row) {
  auto& of = here->told_where[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  wait_for_warp();
  of[lane] = row;
  wait_for_warp();
  for (int i = 0; i < 4; i++) memcpy(&r[i], of[8 * i + lane / 4] + lane % 4 * 2, 4);
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  kernel(*(A*)values[I]...);
}

// All programs of a grid, one cluster after another. values: where each argument lies, as cuLaunchKernel takes them.
template <class... A>
void run(void (*kernel)(A...), int grid_x, int grid_y, int threads, void** values) {
  gridDim = {grid_x, grid_y};
  for (int y = 0; y < grid_y; y++)
    for (int x = 0; x < grid_x; x += CLUSTER) {
      std::barrier<> all(CLUSTER * threads);
      cluster_waits = &all;
      cluster.clear();
      for (int i = 0; i < CLUSTER; i++) cluster.push_back(std::make_unique<Program>(threads));
      std::vector<std::thread> running;
      for (int i = 0; i < CLUSTER * threads; i++)
        running.emplace_back([=] {
          threadIdx = {i % threads, 0};
          blockIdx = {x + i / threads, y};
          here = cluster[i / threads].get();
          memory = here->shared;
          call(kernel, values, std::index_sequence_for<A...>());
        });
      for (auto& thread : running) thread.join();
    }
}
