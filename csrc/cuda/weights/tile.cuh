// Tiles in shared memory for products with block-sparse weights, and their operands.
#pragma once
#include "core/weights/matmul.h"
#include "cuda/common.cuh"
#include "cuda/mma.cuh"

namespace sbnet {
namespace portable {

// Byte of a 16-byte word of a tile whose rows are kWords words. Words are swizzled, so that eight rows read at one
// column fall into different banks.
template <int kWords>
__device__ __forceinline__ uint32_t tile_word(int row, int word) {
  constexpr int kPerLine = kWords < 8 ? 8 / kWords : 1, kMask = kWords < 8 ? kWords - 1 : 7;  // rows in 128 bytes
  return (row * kWords + (word ^ (row / kPerLine & kMask))) * 16;
}

// As load_matrix_x4, each 8x8 matrix of 16-bit elements transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
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
