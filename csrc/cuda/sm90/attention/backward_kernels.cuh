// Which configuration a problem runs, of one size of heads, in one pass or two.
#pragma once
#include "cuda/sm90/attention/backward.cuh"
#include "cuda/sm90/attention/backward_launch.cuh"

namespace sbnet::sm90::attention {
namespace {

// pick(launch, Configs<T>) calls launch(config) with what the problem runs.
template <template <class> class Configs, class Pick>
Status launch_backward_of(const AttentionBackwardParams& p, const BackwardSpace& space, const Lists& lists,
                          const DeviceInfo& device, cudaStream_t stream, const Pick& pick) {
  const auto launch = [&](auto config) {
    using C = decltype(config);
    return launch_backward<C, attention_backward_kernel<C>>(p, space, lists, device, stream);
  };
  return p.forward.dtype == DType::kBF16 ? pick(launch, Configs<__nv_bfloat16>()) : pick(launch, Configs<__half>());
}

// Configs<T>: Shared and Alone.
template <template <class> class Configs>
Status launch_one_pass(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardSpace& space,
                       const Lists& lists, bool, const DeviceInfo& device, cudaStream_t stream) {
  return launch_backward_of<Configs>(p, space, lists, device, stream, [&](const auto& launch, auto configs) {
    using All = decltype(configs);
    return plan.shared ? launch(typename All::Shared()) : launch(typename All::Alone());
  });
}

// Configs<T>: SharedKeys, AloneKeys, SharedQueries, AloneQueries, and with dropout DropsKeys, DropsQueries.
template <template <class> class Configs>
Status launch_a_pass(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardSpace& space,
                     const Lists& lists, bool of_queries, const DeviceInfo& device, cudaStream_t stream) {
  return launch_backward_of<Configs>(p, space, lists, device, stream, [&](const auto& launch, auto configs) {
    using All = decltype(configs);
    if (p.forward.dropout.p > 0)
      return of_queries ? launch(typename All::DropsQueries()) : launch(typename All::DropsKeys());
    if (of_queries) return plan.shared ? launch(typename All::SharedQueries()) : launch(typename All::AloneQueries());
    return plan.shared ? launch(typename All::SharedKeys()) : launch(typename All::AloneKeys());
  });
}

}  // namespace
}  // namespace sbnet::sm90::attention
