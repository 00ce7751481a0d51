// A whole bottleneck block in one Hopper kernel, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/bottleneck.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Does the kernel take it? Up to 512 channels and a width of up to 128, multiples of 8, blocks of multiples of 8
// pixels.
bool bottleneck_takes(const BottleneckParams& p);

// Launches on `stream` of the current device, which `device` describes. Needs bottleneck_takes(p), no workspace.
Status bottleneck(const BottleneckParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
