// The backward kernels for heads of 64, all in one pass; backward.cuh has them.
#include "cuda/sm90/attention/backward_kernels.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class T>
struct Configs {  //                 met  warpgroups  groups  stages  buffers of dS
  using Shared = BackwardConfig<T, 64, 128, 2, 1, 5, 2, Pass::kBulk, true>;
  using Alone = BackwardConfig<T, 64, 64, 1, 3, 4, 1, Pass::kBulk, true>;
};

}  // namespace

BackwardLaunch* const launch_backward_d64 = launch_one_pass<Configs>;

}  // namespace sbnet::sm90::attention
