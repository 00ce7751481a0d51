// Block-sparse convolution of int8 for Hopper (conv_bytes.cuh): sums are int32, hence exact, and need no runs.
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_bytes.cuh"

namespace sbnet::sm90 {

Status conv_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  return launch<int8_t, false>(p, device, stream);
}

}  // namespace sbnet::sm90
