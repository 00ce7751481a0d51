// A whole bottleneck block in one Hopper kernel, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/masked/bottleneck.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. hopper_bottleneck_declines(p) must not; needs
// no workspace.
Status bottleneck(const BottleneckParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
