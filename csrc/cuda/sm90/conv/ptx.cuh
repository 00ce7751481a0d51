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

#define SBNET_F8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
// d[64 x N] (+)= A[64 x 8] * B[N x 8]^T of tf32: float32 whose low 13 bits are not read.
template <int N, int kSums>
__device__ __forceinline__ void wgmma_tf32(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  static_assert((N == 32 || N == 128) && N / 2 <= kSums);
  if constexpr (N == 32)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, %16, %17, p, 1, 1;\n}\n"
        : SBNET_F8(0), SBNET_F8(8)
        : "l"(a), "l"(b), "r"(accumulate));
  else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}\n"
        : SBNET_F8(0), SBNET_F8(8), SBNET_F8(16), SBNET_F8(24), SBNET_F8(32), SBNET_F8(40), SBNET_F8(48), SBNET_F8(56)
        : "l"(a), "l"(b), "r"(accumulate));
}
#undef SBNET_F8

}  // namespace sbnet::sm90
