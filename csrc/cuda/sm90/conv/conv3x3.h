// The fast Hopper path of the block-sparse convolution: 3x3, stride 1 or 2, padding 1, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. select_conv() must have chosen it; needs no
// workspace: partial sums travel through the shared memory of a thread block cluster.
Status conv3x3(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
