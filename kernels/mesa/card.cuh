// What a card has to offer to one_token.cu. The tests put a CPU's threads in its place (tests/kernels/cuda_on_cpu.h).
typedef unsigned short bfloat16;
typedef long long int64;
#define DEVICE __device__ __forceinline__

extern __shared__ float4 memory[];

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// 16 bytes from memory to shared memory, there after `copies_done` for the thread that asked.
DEVICE void copy_16(void* to, const void* from, bool) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch.
DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE float to_float(bfloat16 x) { return __uint_as_float((unsigned)x << 16); }

DEVICE bfloat16 to_bfloat16(float x) {
  bfloat16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
