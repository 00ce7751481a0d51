// sparse_activation_grad on CUDA: one pass over the plane (plane_map.cuh), or over a list.
#include "core/masked/activation_grad.h"
#include "cuda/masked/activation_grad.cuh"
#include "cuda/masked/plane_map.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_activation_grad";

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
        return TwoWords<T, kN>{*word_at<T, kN>(p.grad, at, first), *word_at<T, kN>(p.x, at, first)};
      },
      [&](const PlanePixel& at, const TwoWords<T, kN>& in) {
        store_word<T, kN>(p.y, at, first, [&](int e) {
          return gradient(p.activation, slope[e], to_float(in.a.channel[e]), to_float(in.b.channel[e]));
        });
      });
}

template <class T, int kN, bool kRelu>
__global__ void __launch_bounds__(kPixelThreads)
    activation_grad_list_kernel(const __grid_constant__ ActivationGradParams p,
                                const __grid_constant__ PixelPlan plan) {
  for_pixels<T>(p, plan, [&](int n, int row, int column, int word) {
    const PlanePixel at = {n, row, column, true};
    const int64_t channel = int64_t{word} * kN;
    const Word<T, kN> grad = *word_at<T, kN>(p.grad, at, channel), z = *word_at<T, kN>(p.x, at, channel);
    store_word<T, kN>(p.y, at, channel, [&](int e) {
      const float slope = !p.slope                       ? p.activation_param
                          : p.slope_dtype == DType::kF32 ? static_cast<const float*>(p.slope)[channel + e]
                                                         : to_float(static_cast<const T*>(p.slope)[channel + e]);
      return gradient(kRelu ? Activation::kRelu : p.activation, slope, to_float(grad.channel[e]),
                      to_float(z.channel[e]));
    });
  });
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
      channels_vectorize(p.grad) && channels_vectorize(p.x) && channels_vectorize(p.y) && p.y.size[1] % kLanes<T> == 0;
  if (p.active.given()) {
    constexpr int kN = kLanes<T>;
    if (words && p.activation == Activation::kRelu)
      return launch_pixels<activation_grad_list_kernel<T, kN, true>>(kOp, p, kN, device, stream);
    return words ? launch_pixels<activation_grad_list_kernel<T, kN, false>>(kOp, p, kN, device, stream)
                 : launch_pixels<activation_grad_list_kernel<T, 1, false>>(kOp, p, 1, device, stream);
  }
  return words ? launch_plane<kLanes<T>>(kOp, activation_grad_kernel<T, kLanes<T>>, p, device, stream)
               : launch_plane<1>(kOp, activation_grad_kernel<T, 1>, p, device, stream);
}

}  // namespace
}  // namespace sbnet

namespace {

bool writes_nothing(const sbnet::ActivationParams&) { return false; }
bool writes_nothing(const sbnet::ActivationGradParams& p) { return p.active.given() && sbnet::writes_nothing(p); }

template <class Params>
sbnet::Status run(const Params& p, void* stream) {
  using namespace sbnet;
  SBNET_TRY(validate(p));
  if (!p.y.size[0] || !p.y.size[1] || !p.y.size[2] || !p.y.size[3] || ::writes_nothing(p)) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_dtype(p.y.dtype, [&](auto t) { return launch<decltype(t)>(p, device, static_cast<cudaStream_t>(stream)); });
}

}  // namespace

sbnet::Status sbnet_sparse_activation_grad_cuda(const sbnet::ActivationGradParams* p, void* stream) {
  return run(*p, stream);
}

sbnet::Status sbnet_sparse_activation_cuda(const sbnet::ActivationParams* p, void* stream) { return run(*p, stream); }
