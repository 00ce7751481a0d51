// Instructions that only the block-sparse products need, beside those of cuda/sm90/ptx.cuh: operands whose rows are the
// reduction, and weights from registers at any width.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90::matmul {

__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t from, int c, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(from),
               "r"(c), "r"(row)
               : "memory");
}
__device__ __forceinline__ void multicast_pixels(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int x, int y,
                                                 int n, uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(x), "r"(y), "r"(n), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// The low half of an operand's descriptor (the high one is wgmma_layout(1024)). For operands whose rows are the
// reduction, 64 of their M or N to a row: next_64 bytes lie between 64 of them and the next 64.
__device__ __forceinline__ uint32_t operand(uint32_t address, uint32_t next_64 = 0) {
  return (address & 0x3FFFF) >> 4 | next_64 >> 4 << 16;
}

// d[64 x N] += A[64 x 16] * B[N x 16]^T. Transposed: the operand's rows are the reduction.
template <class T, int N, bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void multiply_add(float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma<T, N, kATransposed, kBTransposed>(d, a, b, 1);
}
// With A in registers: as mma.sync's fragments, a warp's 16 rows each.
template <class T, int N>
__device__ __forceinline__ void multiply_add(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_registers<T, N>(d, a, b, 1);
}

}  // namespace sbnet::sm90::matmul
