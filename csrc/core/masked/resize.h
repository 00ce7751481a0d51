// Block-sparse resizing: PyTorch's nearest, nearest-exact, bilinear and bicubic interpolation on the active blocks of
// the OUTPUT plane, nowhere else.
#pragma once
#include <cmath>

#include "core/layer.h"

namespace sbnet {

enum class ResizeMode : int32_t { kNearest, kNearestExact, kBilinear, kBicubic };
inline constexpr const char* kResizeModes[] = {"nearest", "nearest-exact", "bilinear", "bicubic"};

struct ResizeParams {
  ResizeMode mode;
  TensorView x;       // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView y;       // [N, C, Ho, Wo] of x.dtype, any strides; must not overlap x
  ActiveView active;  // tiling grid of y's plane: offset 0, stride = size, count = ceil(plane / size)
  FringeView fringe;
  bool align_corners;  // the corners' centres meet; bilinear and bicubic
  float ratio[2];      // pixels of x from an output to the next; 0: as the sides of the planes say
};

// Shapes, dtypes, grid against plane, ratios. Everything a kernel relies on.
SBNET_EXPORT Status validate(const ResizeParams& p);

// Along one axis: what output o reads, and with which weights. PyTorch's arithmetic, in float32.
struct ResizeAxis {
  float ratio;
  int32_t side;  // of x
  ResizeMode mode;
  bool align_corners;
  ResizeAxis() = default;
  ResizeAxis(const ResizeParams& p, int d)
      : side(static_cast<int32_t>(p.x.size[2 + d])), mode(p.mode), align_corners(p.align_corners) {
    const int64_t out = p.y.size[2 + d];
    if (align_corners)
      ratio = out > 1 ? static_cast<float>(side - 1) / static_cast<float>(out - 1) : 0.f;
    else
      ratio = p.ratio[d] > 0 ? p.ratio[d] : static_cast<float>(side) / static_cast<float>(out);
  }
  SBNET_HOST_DEVICE int clipped(int at) const { return at < 0 ? 0 : at < side ? at : side - 1; }
  // A coordinate may be far outside: no int holds every float.
  SBNET_HOST_DEVICE int whole(float at) const {
    const float most = static_cast<float>(side) + 4.f;
    return static_cast<int>(floorf(at < -4.f ? -4.f : at < most ? at : most));
  }
  SBNET_HOST_DEVICE float source(int o) const {
    return align_corners ? ratio * static_cast<float>(o) : ratio * (static_cast<float>(o) + 0.5f) - 0.5f;
  }
  SBNET_HOST_DEVICE int nearest(int o) const {
    const float at = static_cast<float>(o) + (mode == ResizeMode::kNearestExact ? 0.5f : 0.f);
    return clipped(whole(at * ratio));
  }
  SBNET_HOST_DEVICE void taps(int o, int (&at)[2], float (&weight)[2]) const {
    const float from = source(o), inside = from < 0.f ? 0.f : from;
    at[0] = clipped(whole(inside)), at[1] = clipped(at[0] + 1);
    const float share = inside - static_cast<float>(at[0]);
    weight[1] = share < 1.f ? share : 1.f, weight[0] = 1.f - weight[1];
    // A neighbour that counts nothing may lie outside what the layer's Window says, and hold anything.
    if (share == 0.f) at[1] = at[0], weight[0] = weight[1] = 0.5f;
  }
  SBNET_HOST_DEVICE void taps(int o, int (&at)[4], float (&weight)[4]) const {
    const float from = source(o);
    const int first = whole(from);
    const float t = from - static_cast<float>(first), u = 1.f - t;
    constexpr float kA = -0.75f;
    weight[0] = ((kA * (t + 1.f) - 5.f * kA) * (t + 1.f) + 8.f * kA) * (t + 1.f) - 4.f * kA;
    weight[1] = ((kA + 2.f) * t - (kA + 3.f)) * t * t + 1.f;
    weight[2] = ((kA + 2.f) * u - (kA + 3.f)) * u * u + 1.f;
    weight[3] = ((kA * (u + 1.f) - 5.f * kA) * (u + 1.f) + 8.f * kA) * (u + 1.f) - 4.f * kA;
    for (int k = 0; k < 4; ++k) at[k] = clipped(first - 1 + k);
  }
};

}  // namespace sbnet

SBNET_DECLARE(sparse_resize2d, ResizeParams)

namespace sbnet {

struct ResizeLayer : LayerOf<ResizeParams> {
  static constexpr const char* kName = "sparse_resize2d";
  template <class Read>
  static void numbers(ResizeParams& p, Read& read) {
    read.sides("size", &p.y.size[2]);
    choice(read, "mode", &p.mode, kResizeModes);
    read.flag("align_corners", &p.align_corners, false);
    read.real("ratio_h", &p.ratio[0], 0);
    read.real("ratio_w", &p.ratio[1], 0);
  }
  SBNET_EXPORT static Status check(const ResizeParams& p);
  SBNET_EXPORT static Status size(const ResizeParams& p, int d, int64_t x, int64_t* y);
  static constexpr auto kernels = SBNET_KERNELS(sparse_resize2d);
};

}  // namespace sbnet
