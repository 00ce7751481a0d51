#include "cuda/masked/conv_patch_mix.cuh"

namespace sbnet::portable {

Status launch_patch_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return launch_units<int8_t>(p, device, stream);
}

}  // namespace sbnet::portable
