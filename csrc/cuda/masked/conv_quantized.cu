// sparse_conv2d_quantized on CUDA: a thread sums one output, four neighbouring channels a step where x is int8 and
// memory allows.
#include <cstdint>

#include "core/masked/conv_quantized.h"
#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_conv2d_quantized";

// Are all runs of four channels of a weight, and of x where it meets them, words of memory?
bool four_channels(const QuantizedConv2dParams& p) {
  bool fits = p.x.dtype == DType::kI8 && p.weight.size[1] % 4 == 0 && p.x.stride[1] == 1 && p.weight.stride[1] == 1;
  for (const TensorView* t : {&p.x, &p.weight}) {
    fits = fits && reinterpret_cast<uintptr_t>(t->data) % 4 == 0;
    for (const int d : {0, 2, 3}) fits = fits && (t->stride[d] % 4 == 0 || t->size[d] == 1);
  }
  return fits;
}

// Nearest integer, halves to even; NaN gives 0.
__device__ int8_t to_int8(float v) {
  const int nearest = __float2int_rn(v);
  return static_cast<int8_t>(nearest < -128 ? -128 : nearest > 127 ? 127 : nearest);
}

__device__ int as_int8(int8_t v, float) { return v; }
__device__ int as_int8(float v, float per_unit) { return to_int8(v * per_unit); }

// T: of y; X: of x.
template <class T, class X, bool kFour>
__global__ void __launch_bounds__(kPixelThreads)
    quantized_kernel(const __grid_constant__ QuantizedConv2dParams p, const __grid_constant__ PixelPlan plan) {
  for_pixels<T>(p, plan, [&](int n, int row, int column, int k) {
    const int channels = static_cast<int>(p.weight.size[1]);
    const int group = k / (static_cast<int>(p.weight.size[0]) / p.groups);
    const X* x = static_cast<const X*>(p.x.data) + n * p.x.stride[0] + int64_t{group} * channels * p.x.stride[1];
    const float per_unit = 1 / p.x_scale;
    const int8_t* w = static_cast<const int8_t*>(p.weight.data) + k * p.weight.stride[0];
    int sum = 0;
    for (int r = 0; r < p.weight.size[2]; ++r) {
      const int64_t y = int64_t{row} * p.stride[0] - p.padding[0] + int64_t{r} * p.dilation[0];
      if (y < 0 || y >= p.x.size[2]) continue;
      for (int s = 0; s < p.weight.size[3]; ++s) {
        const int64_t at = int64_t{column} * p.stride[1] - p.padding[1] + int64_t{s} * p.dilation[1];
        if (at < 0 || at >= p.x.size[3]) continue;
        const X* input = x + y * p.x.stride[2] + at * p.x.stride[3];
        const int8_t* weight = w + r * p.weight.stride[2] + s * p.weight.stride[3];
        if constexpr (kFour) {
          for (int c = 0; c < channels; c += 4)
            sum = __dp4a(*reinterpret_cast<const int*>(input + c), *reinterpret_cast<const int*>(weight + c), sum);
        } else {
          for (int c = 0; c < channels; ++c)
            sum += as_int8(input[c * p.x.stride[1]], per_unit) * weight[c * p.weight.stride[1]];
        }
      }
    }
    float v[1][1] = {{fmaf(static_cast<float>(sum), p.scale[k], p.bias ? static_cast<const float*>(p.bias)[k] : 0.f)}};
    if (p.residual.data) {
      const TensorView& t = p.residual;
      const int64_t at = n * t.stride[0] + k * t.stride[1] + row * t.stride[2] + column * t.stride[3];
      const float added = t.dtype == DType::kF32 ? static_cast<const float*>(t.data)[at]
                                                 : static_cast<float>(static_cast<const int8_t*>(t.data)[at]);
      v[0][0] = fmaf(p.residual_scale, added, v[0][0]);
    }
    activate(p.activation, p.slope ? static_cast<const float*>(p.slope)[k] : p.activation_param, v);
    T* out = static_cast<T*>(p.y.data) + n * p.y.stride[0] + k * p.y.stride[1] + row * p.y.stride[2] +
             column * p.y.stride[3];
    if constexpr (sizeof(T) == 1)
      *out = to_int8(v[0][0] * (1 / p.out_scale));
    else
      *out = v[0][0];
  });
}

template <class T>
Status launch(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.x.dtype == DType::kF32) return launch_pixels<quantized_kernel<T, float, false>>(kOp, p, 1, device, stream);
  return four_channels(p) ? launch_pixels<quantized_kernel<T, int8_t, true>>(kOp, p, 1, device, stream)
                          : launch_pixels<quantized_kernel<T, int8_t, false>>(kOp, p, 1, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_conv2d_quantized_cuda(const sbnet::QuantizedConv2dParams* params, void* stream_handle) {
  using namespace sbnet;
  const QuantizedConv2dParams& p = *params;
  return run_layer(kOp, p, stream_handle, [&](const DeviceInfo& device, cudaStream_t stream) {
    return p.y.dtype == DType::kI8 ? launch<int8_t>(p, device, stream) : launch<float>(p, device, stream);
  });
}
