// sparse_conv2d_quantized on CUDA: which kernel serves which, and the portable one, which takes all: a thread sums one
// output, four neighbouring channels a step where x is of bytes and memory allows.
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "core/masked/conv_quantized.h"
#include "core/masked/conv_select.h"
#include "cuda/capability.h"
#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/conv_quantized.cuh"
#include "cuda/masked/pixels.cuh"
#ifdef SBNET_SM90
#include "cuda/sm90/conv/conv.h"
#endif

namespace sbnet {
namespace {

constexpr const char* kOp = kQuantizedConvOp;

using Float8 = __nv_fp8_e4m3;

// Are all runs of four channels of a weight, and of the same group of x, words of memory?
bool four_channels(const QuantizedConv2dParams& p) {
  bool fits = p.x.dtype == p.weight.dtype && p.weight.size[1] % 4 == 0 && p.x.stride[1] == 1 && p.weight.stride[1] == 1;
  for (const TensorView* t : {&p.x, &p.weight}) {
    fits = fits && reinterpret_cast<uintptr_t>(t->data) % 4 == 0;
    for (const int d : {0, 2, 3}) fits = fits && (t->stride[d] % 4 == 0 || t->size[d] == 1);
  }
  return fits;
}

// Element `at` of a tensor of any dtype that a residual may have.
__device__ float element(const TensorView& t, int64_t at) {
  switch (t.dtype) {
    case DType::kI8:
      return static_cast<const int8_t*>(t.data)[at];
    case DType::kF8:
      return to_float(static_cast<const Float8*>(t.data)[at]);
    case DType::kF16:
      return to_float(static_cast<const __half*>(t.data)[at]);
    case DType::kBF16:
      return to_float(static_cast<const __nv_bfloat16*>(t.data)[at]);
    default:
      return static_cast<const float*>(t.data)[at];
  }
}

__device__ int64_t offset_of(const TensorView& t, int n, int row, int column, int k) {
  return n * t.stride[0] + k * t.stride[1] + row * t.stride[2] + column * t.stride[3];
}

// Calls f(elements from x's first, elements from the weight's first) for each tap of an output, at channel 0.
template <class F>
__device__ __forceinline__ void for_taps(const QuantizedConv2dParams& p, int n, int row, int column, int k,
                                         const F& f) {
  for (int r = 0; r < p.weight.size[2]; ++r) {
    const int64_t y = int64_t{row} * p.stride[0] - p.padding[0] + int64_t{r} * p.dilation[0];
    if (y < 0 || y >= p.x.size[2]) continue;
    for (int s = 0; s < p.weight.size[3]; ++s) {
      const int64_t at = int64_t{column} * p.stride[1] - p.padding[1] + int64_t{s} * p.dilation[1];
      if (at < 0 || at >= p.x.size[3]) continue;
      f(n * p.x.stride[0] + y * p.x.stride[2] + at * p.x.stride[3],
        k * p.weight.stride[0] + r * p.weight.stride[2] + s * p.weight.stride[3]);
    }
  }
}

// The output of a sum, before it is rounded.
__device__ __forceinline__ float finished(const QuantizedConv2dParams& p, float sum, int n, int row, int column,
                                          int k) {
  float v[1][1] = {{fmaf(sum, p.scale[k], p.bias ? static_cast<const float*>(p.bias)[k] : 0.f)}};
  const float slope = p.slope ? static_cast<const float*>(p.slope)[k] : p.activation_param;
  const bool after = adds_after(p);
  if (after) activate(p.activation, slope, v);
  if (p.residual.data)
    v[0][0] = fmaf(p.residual_scale, element(p.residual, offset_of(p.residual, n, row, column, k)), v[0][0]);
  if (!after) activate(p.activation, slope, v);
  return v[0][0];
}

// T: of y. kFloats: x is of floats; kFour: of bytes, in words of four channels.
template <class T, bool kFloats, bool kFour>
__global__ void __launch_bounds__(kPixelThreads)
    quantized_kernel(const __grid_constant__ QuantizedConv2dParams p, const __grid_constant__ PixelPlan plan) {
  for_pixels<T>(p, plan, [&](int n, int row, int column, int k) {
    const int channels = static_cast<int>(p.weight.size[1]);
    const int group = k / (static_cast<int>(p.weight.size[0]) / p.groups);
    const int64_t first = int64_t{group} * channels * p.x.stride[1];
    const int8_t* x = static_cast<const int8_t*>(p.x.data) + first;
    const float per_unit = 1 / p.x_scale;
    const int8_t* w = static_cast<const int8_t*>(p.weight.data);
    int sum = 0;
    for_taps(p, n, row, column, k, [&](int64_t x_at, int64_t w_at) {
      if constexpr (kFour) {
        for (int c = 0; c < channels; c += 4)
          sum = __dp4a(*reinterpret_cast<const int*>(x + x_at + c), *reinterpret_cast<const int*>(w + w_at + c), sum);
      } else if constexpr (kFloats) {
        for (int c = 0; c < channels; ++c)
          sum += to_int8(element(p.x, first + x_at + c * p.x.stride[1]) * per_unit) * w[w_at + c * p.weight.stride[1]];
      } else {
        for (int c = 0; c < channels; ++c) sum += x[x_at + c * p.x.stride[1]] * w[w_at + c * p.weight.stride[1]];
      }
    });
    const float v = finished(p, static_cast<float>(sum), n, row, column, k);
    static_cast<T*>(p.y.data)[offset_of(p.y, n, row, column, k)] =
        rounded<T>(sizeof(T) == 1 ? v * (1 / p.out_scale) : v);
  });
}

// The same of float8, in float32. kFour: x is float8, too, in words of four channels.
template <class T, bool kFour>
__global__ void __launch_bounds__(kPixelThreads)
    float8_kernel(const __grid_constant__ QuantizedConv2dParams p, const __grid_constant__ PixelPlan plan) {
  for_pixels<T>(p, plan, [&](int n, int row, int column, int k) {
    const Float8* w = static_cast<const Float8*>(p.weight.data);
    const bool rounds = p.x_scale > 0;
    const float per_unit = 1 / p.x_scale;
    float sum = 0.f;
    for_taps(p, n, row, column, k, [&](int64_t x_at, int64_t w_at) {
      if constexpr (kFour) {
        const Float8* x = static_cast<const Float8*>(p.x.data);
        for (int c = 0; c < p.x.size[1]; c += 4) {
          const auto inputs = *reinterpret_cast<const Pack<Float8, 4>*>(x + x_at + c);
          const auto weights = *reinterpret_cast<const Pack<Float8, 4>*>(w + w_at + c);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum = fmaf(to_float(inputs.v[e]), to_float(weights.v[e]), sum);
        }
      } else {
        for (int c = 0; c < p.x.size[1]; ++c) {
          float x = element(p.x, x_at + c * p.x.stride[1]);
          if (rounds) x = to_float(from_float<Float8>(x * per_unit));
          sum = fmaf(x, to_float(w[w_at + c * p.weight.stride[1]]), sum);
        }
      }
    });
    const float v = finished(p, sum, n, row, column, k);
    T* out = static_cast<T*>(p.y.data) + offset_of(p.y, n, row, column, k);
    *out = from_float<T>(sizeof(T) == 1 ? v * (1 / p.out_scale) : v);
  });
}

template <class T>
Status launch(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.x.dtype != DType::kI8) return launch_pixels<quantized_kernel<T, true, false>>(kOp, p, 1, device, stream);
  return four_channels(p) ? launch_pixels<quantized_kernel<T, false, true>>(kOp, p, 1, device, stream)
                          : launch_pixels<quantized_kernel<T, false, false>>(kOp, p, 1, device, stream);
}

template <class T>
Status launch_float8(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return four_channels(p) ? launch_pixels<float8_kernel<T, true>>(kOp, p, 1, device, stream)
                          : launch_pixels<float8_kernel<T, false>>(kOp, p, 1, device, stream);
}

BytesKernel kernel_of(const QuantizedConv2dParams& p, const DeviceInfo& device) {
  return select_bytes(p, select_capability(device)).kernel;
}

// The layer with x as bytes at `data`, channels-last, its pixels 16-byte aligned.
QuantizedConv2dParams of_bytes(const QuantizedConv2dParams& p, void* data) {
  QuantizedConv2dParams bytes = p;
  const int64_t pitch = (p.x.size[1] + 15) / 16 * 16;
  const int64_t strides[4] = {p.x.size[2] * p.x.size[3] * pitch, 1, p.x.size[3] * pitch, pitch};
  std::copy(strides, strides + 4, bytes.x.stride);
  bytes.x.data = data, bytes.x.dtype = p.weight.dtype, bytes.x_scale = 0;
  return bytes;
}

// Is x to be rounded into the workspace, since a kernel on tensor cores takes it then?
bool rounds_first(const QuantizedConv2dParams& p, const DeviceInfo& device) {
  if (p.x.dtype == p.weight.dtype || !portable::can_round(p)) return false;
  void* const aligned = reinterpret_cast<void*>(uintptr_t{1} << 20);  // asked about, never read
  return kernel_of(of_bytes(p, aligned), device) != BytesKernel::kPortable;
}

Status launch_layer(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const BytesKernel kernel = kernel_of(p, device);
#ifdef SBNET_SM90
  if (kernel == BytesKernel::kHopper1x1) return sm90::conv1x1_bytes(p, device, stream);
  if (kernel == BytesKernel::kHopper)
    return p.x.dtype == DType::kI8 ? sm90::conv_int8(p, device, stream) : sm90::conv_float8(p, device, stream);
#endif
  if (kernel == BytesKernel::kPatch3x3) return portable::launch_patch_int8(p, device, stream);
  if (kernel == BytesKernel::kRows) return portable::launch_rows_int8(p, device, stream);
  if (p.y.dtype == DType::kI8) return launch<int8_t>(p, device, stream);
  if (p.y.dtype == DType::kF8) return launch_float8<Float8>(p, device, stream);
  return by_dtype(p.y.dtype, [&](auto t) {
    return p.weight.dtype == DType::kI8 ? launch<decltype(t)>(p, device, stream)
                                        : launch_float8<decltype(t)>(p, device, stream);
  });
}

}  // namespace
}  // namespace sbnet

int64_t sbnet_sparse_conv2d_quantized_workspace_bytes_cuda(const sbnet::QuantizedConv2dParams* p) {
  using namespace sbnet;
  DeviceInfo device;
  if (!validate(*p).ok() || writes_nothing(*p) || !current_device(kOp, &device).ok()) return 0;
  return rounds_first(*p, device) ? p->x.size[0] * of_bytes(*p, nullptr).x.stride[0] : 0;
}

sbnet::Status sbnet_sparse_conv2d_quantized_cuda(const sbnet::QuantizedConv2dParams* params, void* workspace,
                                                 void* stream_handle) {
  using namespace sbnet;
  const QuantizedConv2dParams& p = *params;
  return run_layer(kOp, p, stream_handle, [&](const DeviceInfo& device, cudaStream_t stream) {
    if (!rounds_first(p, device)) return launch_layer(p, device, stream);
    const QuantizedConv2dParams bytes = of_bytes(p, workspace);
    SBNET_TRY(portable::launch_round(p, bytes.x, device, stream));
    return launch_layer(bytes, device, stream);
  });
}
