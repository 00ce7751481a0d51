// sparse_activation_grad on CUDA: one pass over the plane (plane_map.cuh).
#include "core/masked/activation_grad.h"
#include "cuda/masked/plane_map.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_activation_grad";

// act'(z) dy. Comparisons pass NaN of z on as PyTorch's backward does.
__device__ __forceinline__ float gradient(Activation activation, float slope, float grad, float z) {
  switch (activation) {
    case Activation::kRelu:
      return z <= 0.f ? 0.f : grad;
    case Activation::kRelu6:
      return z <= 0.f || z >= 6.f ? 0.f : grad;
    case Activation::kLeakyRelu:
      return z > 0.f ? grad : grad * slope;
    case Activation::kSilu: {
      const float s = 1.f / (1.f + __expf(-z));
      return grad * (s * (1.f + z * (1.f - s)));
    }
    case Activation::kGelu: {
      const float cdf = 0.5f * (1.f + erff(z * 0.70710678f));
      return grad * (cdf + z * (expf(-0.5f * z * z) * 0.39894228f));
    }
    case Activation::kHardswish:
      return z <= -3.f ? 0.f : z >= 3.f ? grad : grad * (z * 0.33333333f + 0.5f);
    default:
      return grad;
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kPlaneThreads)
    activation_grad_kernel(const __grid_constant__ ActivationGradParams p, const __grid_constant__ PlaneMap map) {
  grid_dependency_wait();
  grid_dependency_release();
  float slope[kN];
  int64_t first = 0;
  for_plane<kN>(
      map,
      [&](int64_t channel) {
        first = channel;
#pragma unroll
        for (int e = 0; e < kN; ++e)
          slope[e] = !p.slope                       ? p.activation_param
                     : p.slope_dtype == DType::kF32 ? static_cast<const float*>(p.slope)[channel + e]
                                                    : to_float(static_cast<const T*>(p.slope)[channel + e]);
      },
      [&](const PlanePixel& at) {
        return TwoWords<T, kN>{*word_at<T, kN>(p.grad, at, first), *word_at<T, kN>(p.z, at, first)};
      },
      [&](const PlanePixel& at, const TwoWords<T, kN>& in) {
        store_word<T, kN>(p.y, at, first, [&](int e) {
          return gradient(p.activation, slope[e], to_float(in.a.channel[e]), to_float(in.b.channel[e]));
        });
      });
}

__device__ __forceinline__ float activate(Activation activation, float slope, float z) {
  switch (activation) {
    case Activation::kRelu:
      return z < 0.f ? 0.f : z;
    case Activation::kRelu6:
      return z < 0.f ? 0.f : z > 6.f ? 6.f : z;
    case Activation::kLeakyRelu:
      return z > 0.f ? z : z * slope;
    case Activation::kSilu:
      return z / (1.f + __expf(-z));
    case Activation::kGelu:
      return 0.5f * z * (1.f + erff(z * 0.70710678f));
    case Activation::kHardswish:
      return z * ((z < -3.f ? 0.f : z > 3.f ? 6.f : z + 3.f) / 6.f);
    default:
      return z;
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kPlaneThreads)
    activation_kernel(const __grid_constant__ ActivationParams p, const __grid_constant__ PlaneMap map) {
  grid_dependency_wait();
  grid_dependency_release();
  int64_t first = 0;
  for_plane<kN>(
      map, [&](int64_t channel) { first = channel; },
      [&](const PlanePixel& at) {
        TwoWords<T, kN> in = {*word_at<T, kN>(p.y, at, first), {}};
        if (p.other.data) in.b = *word_at<T, kN>(p.other, at, first);
        return in;
      },
      [&](const PlanePixel& at, const TwoWords<T, kN>& in) {
        if (!at.active) return;
        store_word<T, kN>(p.y, at, first, [&](int e) {
          const float added = p.other.data ? to_float(in.b.channel[e]) : 0.f;
          return activate(p.activation, p.activation_param, to_float(in.a.channel[e]) + added);
        });
      });
}

template <class T>
Status launch(const ActivationParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return channels_vectorize(p.y) && (!p.other.data || channels_vectorize(p.other)) && p.y.size[1] % kLanes<T> == 0
             ? launch_plane<kLanes<T>>(kOp, activation_kernel<T, kLanes<T>>, p, device, stream)
             : launch_plane<1>(kOp, activation_kernel<T, 1>, p, device, stream);
}

template <class T>
Status launch(const ActivationGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool words =
      channels_vectorize(p.grad) && channels_vectorize(p.z) && channels_vectorize(p.y) && p.y.size[1] % kLanes<T> == 0;
  return words ? launch_plane<kLanes<T>>(kOp, activation_grad_kernel<T, kLanes<T>>, p, device, stream)
               : launch_plane<1>(kOp, activation_grad_kernel<T, 1>, p, device, stream);
}

}  // namespace
}  // namespace sbnet

namespace {

template <class Params>
sbnet::Status run(const Params& p, void* stream) {
  using namespace sbnet;
  SBNET_TRY(validate(p));
  if (!p.y.size[0] || !p.y.size[1] || !p.y.size[2] || !p.y.size[3]) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_dtype(p.y.dtype, [&](auto t) { return launch<decltype(t)>(p, device, static_cast<cudaStream_t>(stream)); });
}

}  // namespace

sbnet::Status sbnet_sparse_activation_grad_cuda(const sbnet::ActivationGradParams* p, void* stream) {
  return run(*p, stream);
}

sbnet::Status sbnet_sparse_activation_cuda(const sbnet::ActivationParams* p, void* stream) { return run(*p, stream); }
