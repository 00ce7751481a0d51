// Gradient of an interpolation on the active blocks of its output: a pixel of dx adds up what it gives the outputs that
// read it, in their order. No atomics, so the bits repeat. All of dx is written, or the blocks of a list alone.
#pragma once
#include "core/masked/resize.h"

namespace sbnet {

struct ResizeGradParams {
  TensorView x;             // dy: [N, C, Ho, Wo] float32, float16 or bfloat16, any strides
  TensorView y;             // dx: [N, C, H, W] of its dtype, any strides; must not overlap it
  ActiveView active;        // a list of dx's plane, whose blocks are written; not given: all of dx is
  FringeView fringe;        // with a list: zeroed
  const int32_t* read_map;  // [N, read_grid.count[0], read_grid.count[1]]: dy is read where it is not negative
  BlockGrid read_grid;      // tiling grid of dy's plane
  ResizeMode mode;
  bool align_corners;
  float ratio[2];

  // The interpolation whose gradient this is.
  ResizeParams forward() const {
    ResizeParams p = {};
    p.mode = mode, p.align_corners = align_corners;
    p.x = y, p.y = x;
    p.ratio[0] = ratio[0], p.ratio[1] = ratio[1];
    return p;
  }
};

SBNET_EXPORT Status validate(const ResizeGradParams& p);

// Along one axis: which outputs read coordinate i of the input, and with which weights. ResizeAxis says so: its
// coordinates never decrease from an output to the next, so the outputs of i are neighbours.
struct ResizeReaders {
  ResizeAxis axis;
  int32_t outputs;
  float per_pixel;  // outputs for each input pixel, about

  ResizeReaders() = default;
  ResizeReaders(const ResizeParams& forward, int d)
      : axis(forward, d),
        outputs(static_cast<int32_t>(forward.y.size[2 + d])),
        per_pixel(axis.ratio > 0x1p-25f ? 1.f / axis.ratio : 0x1p25f) {}

  // The last coordinate that an output may read. kTaps: 1 of a nearest mode, 2 of a bilinear, 4 of a bicubic one.
  template <int kTaps>
  SBNET_HOST_DEVICE int reach(int o) const {
    if (kTaps == 1) return axis.nearest(o);
    const float from = axis.source(o);
    return axis.clipped(axis.whole(kTaps == 2 && from < 0.f ? 0.f : from) + kTaps / 2);
  }
  // The first output that may read i; `outputs` where none does. Starts at a guess, which rounding may move.
  template <int kTaps>
  SBNET_HOST_DEVICE int first(int i) const {
    const float shift = kTaps == 1 || axis.align_corners ? 0.f : 0.5f;
    const float guess = (static_cast<float>(i - kTaps / 2) + shift) * per_pixel - shift;
    int o = guess > 0.f ? static_cast<int>(guess < static_cast<float>(outputs) ? guess : outputs) : 0;
    while (o > 0 && reach<kTaps>(o - 1) >= i) --o;
    while (o < outputs && reach<kTaps>(o) < i) ++o;
    return o;
  }
  // With which weight o reads i; false: neither it nor an output behind it does.
  template <int kTaps>
  SBNET_HOST_DEVICE bool weight(int o, int i, float* found) const {
    if (o >= outputs) return false;
    if constexpr (kTaps == 1) {
      const int at = axis.nearest(o);
      *found = at == i ? 1.f : 0.f;
      return at <= i;
    } else {
      int at[kTaps];
      float weights[kTaps];
      axis.taps(o, at, weights);
      *found = 0.f;
      for (int k = 0; k < kTaps; ++k)
        if (at[k] == i) *found += weights[k];  // several taps lie on the plane's first and last pixel
      return at[0] <= i;
    }
  }
};

}  // namespace sbnet

SBNET_DECLARE(sparse_resize2d_grad, ResizeGradParams)
