// The forward kernel for heads of 64; forward.cuh has it.
#include "cuda/sm90/attention/forward_launch.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class T>
struct Configs {  //               keys  groups  warpgroups  stages of queries, of keys and values
  using Wide = ForwardConfig<T, 64, 128, 1, 3, 2, 11, true>;
  using Alone = ForwardConfig<T, 64, 128, 3, 1, 1, 4, false>;
  using Small = ForwardConfig<T, 64, 64, 4, 1, 2, 5, false>;
  using Drops = ForwardConfig<T, 64, 128, 3, 1, 1, 4, false, true>;
};

}  // namespace

ForwardLaunch* const launch_forward_d64 = launch_forward_of<Configs>;

}  // namespace sbnet::sm90::attention
