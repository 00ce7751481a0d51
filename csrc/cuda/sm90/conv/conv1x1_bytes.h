// The 1x1 convolution of bytes for Hopper, int8 or float8_e4m3fn.
#pragma once
#include "core/masked/conv_quantized.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. p is of BytesKernel::kHopper1x1.
Status conv1x1_bytes(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
