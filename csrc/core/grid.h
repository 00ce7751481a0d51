// Checks that several op families share.
#pragma once
#include "core/types.h"

namespace sbnet {

// A tensor whose sizes kernels can count in 32 bits per dimension (offsets are always 64-bit).
SBNET_EXPORT Status check_plane(const char* op, const char* argument, const TensorView& t);
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
