// Asynchronous copies of a thread, beside the instructions of ../ptx.cuh.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90 {

// kBytes (4, 8 or 16) into shared memory, of which the last ones beyond `valid` become zero; from is not read for none.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, int valid) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(valid), "n"(kBytes)
                 : "memory");
}
// Arrives at `bar`, as one of the arrivals that it counts, when this thread's copies so far have landed.
__device__ __forceinline__ void cp_async_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Both as int8, saturated, `low` in the low byte.
__device__ __forceinline__ uint32_t saturated_bytes(int low, int high) {
  uint32_t r;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(r) : "r"(high), "r"(low));
  return r;
}

// d[64 x N] (+)= A[64 x 8] * B[N x 8]^T of tf32: float32 whose low 13 bits are not read.
template <int N, int kSums>
__device__ __forceinline__ void wgmma_tf32(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  static_assert((N == 32 || N == 128) && N / 2 <= kSums);
  if constexpr (N == 32)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {" SBNET_R16 "}, %16, %17, p, 1, 1;\n}\n"
        : SBNET_F16(0)
        : "l"(a), "l"(b), "r"(accumulate));
  else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" SBNET_R64 "}, %64, %65, p, 1, 1;\n}\n"
        : SBNET_F32(0), SBNET_F32(32)
        : "l"(a), "l"(b), "r"(accumulate));
}

}  // namespace sbnet::sm90
