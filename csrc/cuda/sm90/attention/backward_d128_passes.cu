// The backward kernels for heads of 128 in two passes; backward.cuh has them.
#include "cuda/sm90/attention/backward_kernels.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class T>
struct Configs {  //                        met  warpgroups  groups  stages  buffers of dS
  using SharedKeys = BackwardConfig<T, 128, 64, 2, 1, 8, 0, Pass::kKeys>;
  using AloneKeys = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kKeys>;
  using SharedQueries = BackwardConfig<T, 128, 128, 2, 1, 4, 0, Pass::kQueries>;
  using AloneQueries = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kQueries>;
  using DropsKeys = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kKeys, false, true>;
  using DropsQueries = BackwardConfig<T, 128, 64, 1, 2, 4, 0, Pass::kQueries, false, true>;
};

}  // namespace

BackwardLaunch* const launch_backward_d128_passes = launch_a_pass<Configs>;

}  // namespace sbnet::sm90::attention
