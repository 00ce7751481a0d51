#include "cuda/masked/conv_rows.cuh"

namespace sbnet::portable {

Status launch_rows_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return is_narrow(p) ? launch_taps<int8_t, true>(p, device, stream) : launch_taps<int8_t, false>(p, device, stream);
}

}  // namespace sbnet::portable
