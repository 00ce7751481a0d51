// Convolutions whose windows lie side by side, kernel = stride, as products: a pixel of x is then a patch, all channels
// of its rows, one row after the other, as the weights of an output channel are.
#pragma once
#include "core/masked/conv.h"
#include "core/memory.h"

namespace sbnet {

inline bool is_pixelwise(const Conv2dParams& p) { return p.weight.size[2] == 1 && p.weight.size[3] == 1; }

// Are its windows patches, whose rows are runs of whole 128 bytes of halves each?
inline bool reads_patches(const Conv2dParams& p) {
  const int64_t R = p.weight.size[2], S = p.weight.size[3], row = S * p.x.size[1];
  return !is_pixelwise(p) && p.stride[0] == R && p.stride[1] == S && p.dilation[0] == 1 && p.dilation[1] == 1 &&
         row % 64 == 0 && row * R < 1 << 24 && pixel_strides(p.x).x == p.x.size[1];
}

// The same of patches that are pixels of R * S * C channels, with a stride of 1; the weight keeps its shape. What is
// 1x1 stays as it is.
inline Conv2dParams as_patches(const Conv2dParams& p) {
  if (is_pixelwise(p)) return p;
  Conv2dParams q = p;
  const int64_t R = p.weight.size[2], S = p.weight.size[3];
  const PixelStrides s = pixel_strides(p.x);
  const int64_t size[4] = {p.x.size[0], R * S * p.x.size[1], p.x.size[2] / R, p.x.size[3] / S};
  const int64_t stride[4] = {s.n, 1, R * s.y, S * s.x};
  for (int d = 0; d < 4; ++d) q.x.size[d] = size[d], q.x.stride[d] = stride[d];
  q.stride[0] = q.stride[1] = 1;
  return q;
}

}  // namespace sbnet
