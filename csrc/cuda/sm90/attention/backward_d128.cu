// The backward kernels for heads of 128, all in one pass; backward.cuh has them.
#include "cuda/sm90/attention/backward.cuh"
#include "cuda/sm90/attention/backward_launch.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_backward_d128_kernel(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  attention_backward<C>(a, maps, shared);
}

//                                               met  warpgroups  groups  stages  buffers of dS
template <class T>
using Shared = BackwardConfig<T, 128, 64, 2, 1, 5, 2, Pass::kBulk>;
template <class T>
using Alone = BackwardConfig<T, 128, 64, 1, 2, 4, 2, Pass::kVector>;

}  // namespace

Status launch_backward_d128(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardSpace& space,
                            const Lists& lists, bool, const DeviceInfo& device, cudaStream_t stream) {
  const auto launch = [&](auto config) {
    using C = decltype(config);
    return launch_backward<C, attention_backward_d128_kernel<C>>(p, space, lists, device, stream);
  };
  const auto of_type = [&](auto type) {
    using T = decltype(type);
    return plan.shared ? launch(Shared<T>()) : launch(Alone<T>());
  };
  return p.forward.dtype == DType::kBF16 ? of_type(__nv_bfloat16()) : of_type(__half());
}

}  // namespace sbnet::sm90::attention
