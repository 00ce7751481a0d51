// sparse_rearrange on CUDA: a thread copies a pixel's word of channels, or gathers it channel by channel.
#include "core/masked/rearrange.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_rearrange";

template <class T, int kN>
__global__ void __launch_bounds__(kPixelThreads)
    rearrange_kernel(const __grid_constant__ RearrangeParams p, const __grid_constant__ PixelPlan plan,
                     const __grid_constant__ RearrangeMap map) {
  for_pixels<T, kRunOf<kN>>(p, plan, [&](int n, int row, int column, int word, int count = 1) {
    const int first = word * kN;
    T* y = static_cast<T*>(p.y.data) + n * p.y.stride[0] + first * p.y.stride[1] + row * p.y.stride[2] +
           column * p.y.stride[3];
    const T* x = static_cast<const T*>(p.x.data) + n * p.x.stride[0];
    const bool in_row = map.inside(0, &row);
    for (int i = 0; i < count; ++i) {
      int from = column + i;
      const bool inside = map.inside(1, &from) && in_row;
      Word<T, kN> out;
      if (inside && map.keeps_channels) {
        out = *reinterpret_cast<const Word<T, kN>*>(x + first * p.x.stride[1] + row * p.x.stride[2] +
                                                    from * p.x.stride[3]);
      } else {
        const T value = from_float<T>(p.value);
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          int channel, h = row, w = from;
          if (inside) map.source(first + e, &channel, &h, &w);
          out.channel[e] = inside ? x[channel * p.x.stride[1] + h * p.x.stride[2] + w * p.x.stride[3]] : value;
        }
      }
      *reinterpret_cast<Word<T, kN>*>(y + i * p.y.stride[3]) = out;
    }
  });
}

template <class T>
Status launch_type(const RearrangeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const RearrangeMap map(p);
  constexpr int kN = kLanes<T>;
  const bool stores = channels_vectorize(p.y) && p.y.size[1] % kN == 0;
  if (stores && (!map.keeps_channels || channels_vectorize(p.x)))
    return launch_pixels<rearrange_kernel<T, kN>>(kOp, p, kN, device, stream, map);
  return launch_pixels<rearrange_kernel<T, 1>, kRunOf<1>>(kOp, p, 1, device, stream, map);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_rearrange_cuda(const sbnet::RearrangeParams* params, void* stream_handle) {
  using namespace sbnet;
  return run_layer_by_dtype(kOp, *params, stream_handle, [&](auto t, const DeviceInfo& device, cudaStream_t stream) {
    return launch_type<decltype(t)>(*params, device, stream);
  });
}
