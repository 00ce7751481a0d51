// A convolution as part of another layer: its params are that layer's to validate, its list and plane are not empty.
#pragma once
#include "core/masked/conv.h"
#include "cuda/common.cuh"

namespace sbnet {

Status run_conv(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);

}  // namespace sbnet
