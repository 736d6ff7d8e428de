// What a card has to offer to the kernels in CUDA C. The tests put a CPU's threads in its place (tests/kernels/cuda_on_cpu.h).
typedef unsigned short bfloat16;
typedef long long int64;
#define DEVICE __device__ __forceinline__

extern __shared__ float4 memory[];

// 1 / x for x of any normal size, to an ulp.
DEVICE float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// d [16, 8] += a [16, 8] b [8, 8] of a warp, tf32. Thread 4 g + c has a (g, c), (g + 8, c), (g, c + 4), (g + 8, c + 4), b (c, g), (c + 4, g)
// and d (g, 2 c), (g, 2 c + 1), (g + 8, 2 c), (g + 8, 2 c + 1).
DEVICE void multiply_add(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// d [16, 8] += a [16, 16] b [16, 8] of a warp, bfloat16, two to a number.
DEVICE void multiply_add(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four matrices [8, 8] of bfloat16 out of shared memory: thread 8 i + r says where row r of the i-th lies, and thread 4 g + c gets (g, 2 c) and
// (g, 2 c + 1) of each.
DEVICE void load_matrices(unsigned (&r)[4], const bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

DEVICE void wait_for_warp() { __syncwarp(); }

// 16 bytes from memory to shared memory, or as many zeros: there after `copies_done` of the thread that asked.
DEVICE void copy_16(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}

DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Copies asked for since the last such end are a group; a thread waits for all of its groups but the last N.
DEVICE void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void groups_done_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Programs of a cluster wait for each other; what they wrote to their shared memory before, all may read after.
DEVICE void begin_wait_for_cluster() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// What lies where `mine` does, in the shared memory of another program of the cluster.
DEVICE unsigned address_of(int program, const void* mine) {
  unsigned r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(program));
  return r;
}
DEVICE float4 read_of(int program, const float4* mine) {
  float4 r;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(address_of(program, mine)));
  return r;
}
DEVICE float read_of(int program, const float* mine) {
  float r;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(address_of(program, mine)));
  return r;
}

// Programmatic dependent launch.
DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE float to_float(bfloat16 x) { return __uint_as_float((unsigned)x << 16); }

DEVICE bfloat16 to_bfloat16(float x) {
  bfloat16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
