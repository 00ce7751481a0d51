// The forward of one size of heads: its kernel, and which configuration a problem runs.
#pragma once
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/launch.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ ForwardArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  attention_forward<C>(a, maps, shared);
}

// Configs<T>: Wide, Alone, Small, and Drops with dropout.
template <template <class> class Configs>
Status launch_forward_of(const AttentionParams& p, const ForwardPlan& plan, const Lists& lists,
                         const DeviceInfo& device, cudaStream_t stream) {
  const auto launch = [&](auto config) {
    using C = decltype(config);
    return launch_forward<C, attention_forward_kernel<C>>(p, plan, lists, device, stream);
  };
  const auto of_type = [&](auto configs) {
    using All = decltype(configs);
    if (p.dropout.p > 0) return launch(typename All::Drops());
    switch (plan.kind) {
      case ForwardKind::kWide:
        return launch(typename All::Wide());
      case ForwardKind::kAlone:
        return launch(typename All::Alone());
      default:
        return launch(typename All::Small());
    }
  };
  return p.dtype == DType::kBF16 ? of_type(Configs<__nv_bfloat16>()) : of_type(Configs<__half>());
}

}  // namespace
}  // namespace sbnet::sm90::attention
