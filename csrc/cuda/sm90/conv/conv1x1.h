// The fast Hopper path of the block-sparse 1x1 convolution: stride 1 or 2, no padding, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. select_conv() must have chosen it; needs no
// workspace.
Status conv1x1(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
