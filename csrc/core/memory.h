// What kernels ask of a tensor's memory before they read it in words or by TMA.
#pragma once
#include "core/types.h"

namespace sbnet {

// Can TMA copy boxes of channels of t? (Strides of a dimension of size 1 may be anything.)
bool tma_reads(const TensorView& t);
// Are the weights one run of K x R x S x C, for 16-byte accesses?
bool weights_packed(const TensorView& w);
// May 16 bytes of channels of t, from a multiple of 16 bytes on, be read or written as one word?
bool channels_vectorize(const TensorView& t);
// Strides of the rows, columns and images of a channels-last t, with those of dimensions of size 1 made regular.
struct PixelStrides {
  int64_t n, y, x;
};
PixelStrides pixel_strides(const TensorView& t);

}  // namespace sbnet
