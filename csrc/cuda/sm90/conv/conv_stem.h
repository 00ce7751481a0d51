// The fast Hopper path of a network's first convolution: 7x7, stride 2, padding 3, three input channels, up to 64
// output channels, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. select_conv() must have chosen it; needs no
// workspace.
Status conv_stem(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
