// The convolution of float8 for Hopper: any kernel, stride, dilation and blocks.
#pragma once
#include "core/masked/conv_quantized.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. p is of BytesKernel::kHopper.
Status conv_float8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
