// The backward kernels for heads of 128 in two passes; backward.cuh has them.
#include "cuda/sm90/attention/backward.cuh"
#include "cuda/sm90/attention/backward_launch.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_backward_d128_passes_kernel(const __grid_constant__ BackwardMaps maps,
                                          const __grid_constant__ BackwardArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  attention_backward<C>(a, maps, shared);
}

//                                                    met  warpgroups  groups  stages  buffers of dS
template <class T>
using SharedKeys = BackwardConfig<T, 128, 64, 2, 1, 8, 0, Pass::kKeys>;
template <class T>
using AloneKeys = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kKeys>;
template <class T>
using SharedQueries = BackwardConfig<T, 128, 128, 2, 1, 4, 0, Pass::kQueries>;
template <class T>
using AloneQueries = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kQueries>;
template <class T>
using DropsKeys = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kKeys, false, true>;
template <class T>
using DropsQueries = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kQueries, false, true>;

}  // namespace

Status launch_backward_d128_passes(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                   const BackwardSpace& space, const Lists& lists, bool of_queries,
                                   const DeviceInfo& device, cudaStream_t stream) {
  const auto launch = [&](auto config) {
    using C = decltype(config);
    return launch_backward<C, attention_backward_d128_passes_kernel<C>>(p, space, lists, device, stream);
  };
  const auto of_type = [&](auto type) {
    using T = decltype(type);
    if (p.forward.dropout.p > 0) return of_queries ? launch(DropsQueries<T>()) : launch(DropsKeys<T>());
    if (of_queries) return plan.shared ? launch(SharedQueries<T>()) : launch(AloneQueries<T>());
    return plan.shared ? launch(SharedKeys<T>()) : launch(AloneKeys<T>());
  };
  return p.forward.dtype == DType::kBF16 ? of_type(__nv_bfloat16()) : of_type(__half());
}

}  // namespace sbnet::sm90::attention
