// The forward kernel for heads of 128; forward.cuh has it.
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/launch.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_forward_d128_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ ForwardArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  attention_forward<C>(a, maps, shared);
}

template <class C>
Status launch(const AttentionParams& p, const ForwardPlan& plan, const Lists& lists, const DeviceInfo& device,
              cudaStream_t stream) {
  return launch_forward<C, attention_forward_d128_kernel<C>>(p, plan, lists, device, stream);
}

//                                            keys  groups  warpgroups  stages of queries, of keys and values
template <class T>
using Wide = ForwardConfig<T, 128, 128, 1, 2, 2, 5, false>;
template <class T>
using Alone = ForwardConfig<T, 128, 128, 2, 1, 1, 3, false>;
template <class T>
using Small = ForwardConfig<T, 128, 64, 3, 1, 1, 3, false>;
template <class T>
using Drops = ForwardConfig<T, 128, 128, 2, 1, 1, 3, false, true>;

template <class T>
Status launch_kind(const AttentionParams& p, const ForwardPlan& plan, const Lists& lists, const DeviceInfo& device,
                   cudaStream_t stream) {
  if (p.dropout.p > 0) return launch<Drops<T>>(p, plan, lists, device, stream);
  switch (plan.kind) {
    case ForwardKind::kWide:
      return launch<Wide<T>>(p, plan, lists, device, stream);
    case ForwardKind::kAlone:
      return launch<Alone<T>>(p, plan, lists, device, stream);
    default:
      return launch<Small<T>>(p, plan, lists, device, stream);
  }
}

}  // namespace

Status launch_forward_d128(const AttentionParams& p, const ForwardPlan& plan, const Lists& lists,
                           const DeviceInfo& device, cudaStream_t stream) {
  return p.dtype == DType::kBF16 ? launch_kind<__nv_bfloat16>(p, plan, lists, device, stream)
                                 : launch_kind<__half>(p, plan, lists, device, stream);
}

}  // namespace sbnet::sm90::attention
