// The fast Hopper path of a network's first convolution: 7x7, stride 2, padding 3, three input channels, up to 64
// output channels, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// As conv3x3_takes.
bool conv_stem_takes(const Conv2dParams& p);

// Launches on `stream` of the current device, which `device` describes. Needs conv_stem_takes(p), no workspace.
Status conv_stem(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
