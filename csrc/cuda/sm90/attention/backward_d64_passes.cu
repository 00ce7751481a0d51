// The backward kernels for heads of 64 in two passes; backward.cuh has them.
#include "cuda/sm90/attention/backward_kernels.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class T>
struct Configs {  //                        met  warpgroups  groups  stages  buffers of dS
  using SharedKeys = BackwardConfig<T, 64, 128, 2, 1, 8, 0, Pass::kKeys, true>;
  using AloneKeys = BackwardConfig<T, 64, 64, 1, 3, 6, 0, Pass::kKeys, true>;
  using SharedQueries = BackwardConfig<T, 64, 128, 2, 1, 8, 0, Pass::kQueries>;
  using AloneQueries = BackwardConfig<T, 64, 64, 1, 3, 6, 0, Pass::kQueries>;
  using DropsKeys = BackwardConfig<T, 64, 64, 1, 2, 5, 0, Pass::kKeys, false, true>;
  using DropsQueries = BackwardConfig<T, 64, 64, 1, 3, 6, 0, Pass::kQueries, false, true>;
};

}  // namespace

BackwardLaunch* const launch_backward_d64_passes = launch_a_pass<Configs>;

}  // namespace sbnet::sm90::attention
