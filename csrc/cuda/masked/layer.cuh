// What the kernels of layers (convolution, pooling) share: 16-byte words of channels, and the fringe's zeros.
#pragma once
#include "core/memory.h"
#include "cuda/common.cuh"

namespace sbnet {

// Elements of T in a 16-byte access.
template <class T>
constexpr int kLanes = 16 / sizeof(T);

// The plane whose pixels a layer's fringe counts.
template <class Params>
SBNET_HOST_DEVICE const TensorView& fringe_plane(const Params& p) {
  return p.y;
}

// How a launch spreads the fringe (Params: those of the layer, with y and fringe): 2^log2_threads neighbouring threads
// clear one pixel.
struct FringePlan {
  FastDiv height, width;
  int log2_threads = 0;
  bool vector = false;  // whole 16-byte words of channels

  FringePlan() = default;
  template <class Params>
  explicit FringePlan(const Params& p) : height(fringe_plane(p).size[2]), width(fringe_plane(p).size[3]) {
    const TensorView& plane = fringe_plane(p);
    const int64_t lanes = 16 / dtype_size(plane.dtype);
    vector = channels_vectorize(plane) && plane.size[1] % lanes == 0;
    const int64_t stores = vector ? plane.size[1] / lanes : plane.size[1];
    while (log2_threads < 5 && (1 << log2_threads) < stores) ++log2_threads;
  }
  // Threads that the whole list could use.
  template <class Params>
  int64_t threads(const Params& p) const {
    return p.fringe.pixels ? p.fringe.capacity << log2_threads : 0;
  }
};

// Clears this thread's share of the fringe; `thread` of `threads` counts over the whole grid. No pixel of the fringe is
// an active one, so the order against the tiles does not matter.
template <class T, class Params>
__device__ __forceinline__ void clear_fringe(const Params& p, const FringePlan& plan, int64_t thread, int64_t threads) {
  constexpr int kBatch = 4;
  if (!p.fringe.pixels) return;
  const int64_t count = min(static_cast<int64_t>(max(*p.fringe.count, 0)), p.fringe.capacity);
  const TensorView& plane = fringe_plane(p);
  const int64_t plane_pixels = plane.size[0] * plane.size[2] * plane.size[3];
  const int lane = static_cast<int>(thread) & ((1 << plan.log2_threads) - 1);
  const int64_t step = threads >> plan.log2_threads;
  for (int64_t first = thread >> plan.log2_threads; first < count; first += kBatch * step) {
    int32_t pixels[kBatch];  // loaded together: no load may move above a store
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = first + b * step;
      pixels[b] = i < count ? p.fringe.pixels[i] : -1;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (pixels[b] < 0 || pixels[b] >= plane_pixels) continue;
      uint32_t n, row, column;
      plan.width.divmod(pixels[b], &row, &column);
      plan.height.divmod(row, &n, &row);
      T* y = static_cast<T*>(plane.data) + n * plane.stride[0] + row * plane.stride[2] + column * plane.stride[3];
      if (plan.vector) {
        for (int64_t k = lane * kLanes<T>; k < plane.size[1]; k += kLanes<T> << plan.log2_threads)
          *reinterpret_cast<uint4*>(y + k) = uint4{0, 0, 0, 0};
      } else {
        for (int64_t k = lane; k < plane.size[1]; k += 1 << plan.log2_threads)
          y[k * plane.stride[1]] = from_float<T>(0.f);
      }
    }
  }
}

}  // namespace sbnet
