// The backward kernels for heads of 128, all in one pass; backward.cuh has them.
#include "cuda/sm90/attention/backward_kernels.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class T>
struct Configs {  //                 met  warpgroups  groups  stages  buffers of dS
  using Shared = BackwardConfig<T, 128, 64, 2, 1, 5, 2, Pass::kBulk>;
  using Alone = BackwardConfig<T, 128, 64, 1, 2, 4, 2, Pass::kVector>;
};

}  // namespace

BackwardLaunch* const launch_backward_d128 = launch_one_pass<Configs>;

}  // namespace sbnet::sm90::attention
