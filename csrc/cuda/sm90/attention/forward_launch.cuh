// Which configuration a problem runs, of one size of heads.
#pragma once
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/launch.cuh"

namespace sbnet::sm90::attention {
namespace {

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
