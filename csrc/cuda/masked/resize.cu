// sparse_resize2d on CUDA: a thread computes one output for a word of channels, straight from memory.
#include "core/masked/resize.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_resize2d";

struct ResizeAxes {
  ResizeAxis row, column;
};

// kTaps each way: 1 of a nearest, 2 of a bilinear, 4 of a bicubic one.
template <class T, int kN, int kTaps>
__global__ void __launch_bounds__(kPixelThreads)
    resize_kernel(const __grid_constant__ ResizeParams p, const __grid_constant__ PixelPlan plan,
                  const __grid_constant__ ResizeAxes axes) {
  using Channels = Word<T, kN>;
  for_pixels<T, kRunOf<kN>>(p, plan, [&](int n, int row, int column, int word, int count = 1) {
    const int64_t channel = int64_t{word} * kN;
    const T* x = static_cast<const T*>(p.x.data) + n * p.x.stride[0] + channel * p.x.stride[1];
    T* y = static_cast<T*>(p.y.data) + n * p.y.stride[0] + channel * p.y.stride[1] + row * p.y.stride[2] +
           column * p.y.stride[3];
    int top[kTaps] = {}, left[kTaps];
    float down[kTaps], across[kTaps];
    if constexpr (kTaps == 1)
      top[0] = axes.row.nearest(row);
    else
      axes.row.taps(row, top, down);
    for (int i = 0; i < count; ++i) {
      Channels out;
      if constexpr (kTaps == 1) {
        out = *reinterpret_cast<const Channels*>(x + top[0] * p.x.stride[2] +
                                                 axes.column.nearest(column + i) * p.x.stride[3]);
      } else {
        float sums[kN] = {};
        axes.column.taps(column + i, left, across);
#pragma unroll
        for (int r = 0; r < kTaps; ++r) {
          Channels read[kTaps];
#pragma unroll
          for (int s = 0; s < kTaps; ++s)
            read[s] = *reinterpret_cast<const Channels*>(x + top[r] * p.x.stride[2] + left[s] * p.x.stride[3]);
#pragma unroll
          for (int s = 0; s < kTaps; ++s) {
            const float weight = down[r] * across[s];
#pragma unroll
            for (int e = 0; e < kN; ++e) sums[e] = fmaf(weight, to_float(read[s].channel[e]), sums[e]);
          }
        }
#pragma unroll
        for (int e = 0; e < kN; ++e) out.channel[e] = from_float<T>(sums[e]);
      }
      *reinterpret_cast<Channels*>(y + i * p.y.stride[3]) = out;
    }
  });
}

template <class T, int kN>
Status launch(const ResizeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const ResizeAxes axes = {ResizeAxis(p, 0), ResizeAxis(p, 1)};
  if (p.mode == ResizeMode::kBicubic)
    return launch_pixels<resize_kernel<T, kN, 4>, kRunOf<kN>>(kOp, p, kN, device, stream, axes);
  if (p.mode == ResizeMode::kBilinear)
    return launch_pixels<resize_kernel<T, kN, 2>, kRunOf<kN>>(kOp, p, kN, device, stream, axes);
  return launch_pixels<resize_kernel<T, kN, 1>, kRunOf<kN>>(kOp, p, kN, device, stream, axes);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_resize2d_cuda(const sbnet::ResizeParams* params, void* stream_handle) {
  using namespace sbnet;
  return run_layer_by_word(kOp, *params, stream_handle, [&](auto t, auto lanes, const DeviceInfo& device, auto stream) {
    return launch<decltype(t), decltype(lanes)::value>(*params, device, stream);
  });
}
