// Checks that several op families share.
#pragma once
#include "core/activation.h"
#include "core/types.h"

namespace sbnet {

// A tensor whose sizes kernels can count in 32 bits per dimension (offsets are always 64-bit).
SBNET_EXPORT Status check_plane(const char* op, const char* argument, const TensorView& t);
// Of what an op writes: no element stands for two. (A gradient without elements may be an expanded one.)
template <int kRank>
Status check_written(const char* op, const char* argument, const int64_t (&size)[kRank],
                     const int64_t (&stride)[kRank]) {
  for (const int64_t side : size)
    if (!side) return ok_status();
  for (int d = 0; d < kRank; ++d)
    SBNET_CHECK(stride[d] > 0 || size[d] <= 1,
                "%s: %s: expected a tensor of its own memory, got an expanded one (stride 0 in dimension %d)", op,
                argument, d);
  return ok_status();
}
// An activation that there is; bias and slope (one a channel, of leaky_relu alone), each or null, of x's dtype or
// float32.
SBNET_EXPORT Status check_epilogue(const char* op, DType x, const void* bias, DType bias_dtype, Activation activation,
                                   const void* slope = nullptr, DType slope_dtype = DType::kF32);
// Block sizes, strides and counts positive, and every coordinate within 32 bits.
SBNET_EXPORT Status check_grid(const char* op, const BlockGrid& g);
// Pointers present, capacity within range.
SBNET_EXPORT Status check_active(const char* op, const ActiveView& a);
// The grid tiles an H x W plane: offset 0, stride = size, count = ceil.
SBNET_EXPORT Status check_tiling(const char* op, const BlockGrid& g, int64_t H, int64_t W);
// Might two views share an element? (A bound: true unless their byte ranges, or as slices of one buffer their index
// boxes, are apart.)
bool may_overlap(const TensorView& a, const TensorView& b);

}  // namespace sbnet
