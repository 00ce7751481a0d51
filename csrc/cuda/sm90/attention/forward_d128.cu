// The forward kernel for heads of 128; forward.cuh has it.
#include "cuda/sm90/attention/forward_launch.cuh"

namespace sbnet::sm90::attention {
namespace {

template <class T>
struct Configs {  //               keys  groups  warpgroups  stages of queries, of keys and values
  using Wide = ForwardConfig<T, 128, 128, 1, 2, 2, 5, false>;
  using Alone = ForwardConfig<T, 128, 128, 2, 1, 1, 3, false>;
  using Small = ForwardConfig<T, 128, 64, 3, 1, 1, 3, false>;
  using Drops = ForwardConfig<T, 128, 128, 2, 1, 1, 3, false, true>;
};

}  // namespace

ForwardLaunch* const launch_forward_d128 = launch_forward_of<Configs>;

}  // namespace sbnet::sm90::attention
