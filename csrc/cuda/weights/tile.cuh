// Tiles in shared memory for products with block-sparse weights, and their operands.
#pragma once
#include "core/weights/matmul.h"
#include "cuda/common.cuh"
#include "cuda/products.cuh"

namespace sbnet {
namespace portable {

// Byte of a 16-byte word of a tile whose rows are kWords words. Words are swizzled, so that eight rows read at one
// column fall into different banks.
template <int kWords>
__device__ __forceinline__ uint32_t tile_word(int row, int word) {
  constexpr int kPerLine = kWords < 8 ? 8 / kWords : 1, kMask = kWords < 8 ? kWords - 1 : 7;  // rows in 128 bytes
  return (row * kWords + (word ^ (row / kPerLine & kMask))) * 16;
}

__device__ __forceinline__ uint32_t shared_word(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(shared));
  return v;
}

// float32 operands become tf32.
template <class T>
__device__ __forceinline__ void to_operand(uint32_t (&r)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (uint32_t& v : r) v = round_to_tf32(v);
  }
}

template <class T>
__device__ __forceinline__ float bias_of(const BlocksparseMatmulParams& p, int64_t k) {
  if (!p.bias) return 0.f;
  return p.bias_dtype == DType::kF32 ? static_cast<const float*>(p.bias)[k]
                                     : to_float(static_cast<const T*>(p.bias)[k]);
}

}  // namespace portable
}  // namespace sbnet
