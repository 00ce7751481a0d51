#include "cuda/masked/conv_patch_mix.cuh"

namespace sbnet::portable {

template Status launch_patch<__half>(const Conv2dParams&, const DeviceInfo&, cudaStream_t);

}  // namespace sbnet::portable
