// Instructions that only attention needs, beside those of cuda/sm90/ptx.cuh: products whose B has the reduction as its
// rows, copies without a tensor map, sums made in the L2.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90::attention {

// What is computed from these registers is computed after this line.
template <int kCount>
__device__ __forceinline__ void pin_all(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin_all(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// `count` ones from bit `from` on; both may be beyond 32.
__device__ __forceinline__ uint32_t bit_run(int from, int count) {
  uint32_t r;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(r) : "r"(from), "r"(count));
  return r;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from));
  return v;
}

// A box on its way into the L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* m, int c, int i, int j, int h, int b) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(m), "r"(c), "r"(i),
               "r"(j), "r"(h), "r"(b)
               : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
// Adds floats in shared memory to those in global memory, some time before the group that it is committed to is done.
__device__ __forceinline__ void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_global(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// All committed stores and sums have been made, not only read.
__device__ __forceinline__ void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---------------------------------------------------------------- WGMMA
// A descriptor from shared address / 16, 128-byte swizzle, 1024 bytes between groups of 8 rows. Only the low word is
// variable, so a base address costs one register. next_64: where the rows are the reduction, the bytes from 64 columns
// to the next 64.
__device__ __forceinline__ uint64_t descriptor(uint32_t address_16, uint32_t next_64 = 0) {
  return static_cast<uint64_t>(1u << 30 | 64u) << 32 | (address_16 + (next_64 >> 4 << 16));
}

// No predicate, as wgmma_registers has: with one a kernel of the backward grows by a hundredth.
#define SBNET_WGMMA_REGISTERS(N, TYPE, SUMS, A, B, ...)                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" SUMS "}, {" A "}, " B \
               ", 1, 1, 1, 1;"                                                                           \
               : __VA_ARGS__                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define SBNET_WGMMA_REGISTERS_OF(TYPE)                                                                            \
  if constexpr (N == 64) SBNET_WGMMA_REGISTERS("64", TYPE, SBNET_R32, "%32, %33, %34, %35", "%36", SBNET_F32(0)); \
  if constexpr (N == 128)                                                                                         \
  SBNET_WGMMA_REGISTERS("128", TYPE, SBNET_R64, "%64, %65, %66, %67", "%68", SBNET_F32(0), SBNET_F32(32))

// d[64 x N] += A[64 x 16] * B[16 x N]: A in registers, as mma.sync's fragments; the rows of B are the reduction.
template <class T, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], const uint32_t* a, uint64_t b) {
  static_assert(N == 64 || N == 128);
  if constexpr (std::is_same_v<T, __half>) {
    SBNET_WGMMA_REGISTERS_OF("f16");
  } else {
    SBNET_WGMMA_REGISTERS_OF("bf16");
  }
}
#undef SBNET_WGMMA_REGISTERS_OF
#undef SBNET_WGMMA_REGISTERS
// d[64 x 64] (+)= A[64 x 16] * B[16 x 64], both in shared memory; the rows of B are the reduction.
template <class T>
__device__ __forceinline__ void multiply_rows(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  wgmma<T, 64, false, true>(d, a, b, accumulate);
}

}  // namespace sbnet::sm90::attention
