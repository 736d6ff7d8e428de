// What a card has to offer to outputs.cu and gradients.cu. The tests put a CPU in its place (tests/kernels/cuda_on_cpu.h).
typedef unsigned short bfloat16;
typedef long long int64;
#define DEVICE __device__ __forceinline__

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

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

DEVICE void wait_for_warp() { __syncwarp(); }

// 16 bytes from memory to shared memory, or as many zeros: there after `copies_done` of the thread that asked.
DEVICE void copy_16(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}

DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE float to_float(bfloat16 x) { return __uint_as_float((unsigned)x << 16); }

DEVICE bfloat16 to_bfloat16(float x) {
  bfloat16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
