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
  for_pixels<T>(p, plan, [&](int n, int row, int column, int word) {
    const int first = word * kN;
    T* y = static_cast<T*>(p.y.data) + n * p.y.stride[0] + first * p.y.stride[1] + row * p.y.stride[2] +
           column * p.y.stride[3];
    const T* x = static_cast<const T*>(p.x.data) + n * p.x.stride[0];
    const bool rows = map.inside(0, &row), inside = map.inside(1, &column) && rows;
    Word<T, kN> out;
    if (inside && map.keeps_channels) {
      out = *reinterpret_cast<const Word<T, kN>*>(x + first * p.x.stride[1] + row * p.x.stride[2] +
                                                  column * p.x.stride[3]);
    } else {
      const T value = from_float<T>(p.value);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        int channel, h = row, w = column;
        if (inside) map.source(first + e, &channel, &h, &w);
        out.channel[e] = inside ? x[channel * p.x.stride[1] + h * p.x.stride[2] + w * p.x.stride[3]] : value;
      }
    }
    *reinterpret_cast<Word<T, kN>*>(y) = out;
  });
}

template <class T>
Status launch_type(const RearrangeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const RearrangeMap map(p);
  constexpr int kN = kLanes<T>;
  const bool stores = channels_vectorize(p.y) && p.y.size[1] % kN == 0;
  if (stores && (!map.keeps_channels || channels_vectorize(p.x)))
    return launch_pixels<rearrange_kernel<T, kN>>(kOp, p, kN, device, stream, map);
  return launch_pixels<rearrange_kernel<T, 1>>(kOp, p, 1, device, stream, map);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_rearrange_cuda(const sbnet::RearrangeParams* params, void* stream_handle) {
  using namespace sbnet;
  const RearrangeParams& p = *params;
  SBNET_TRY(validate(p));
  if (writes_nothing(p)) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (p.x.dtype) {
    case DType::kF16:
      return launch_type<__half>(p, device, stream);
    case DType::kBF16:
      return launch_type<__nv_bfloat16>(p, device, stream);
    default:
      return launch_type<float>(p, device, stream);
  }
}
