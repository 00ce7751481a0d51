// The fast Hopper path of the block-sparse convolution: 3x3, stride 1 or 2, padding 1, fp16 and bf16 (TMA + WGMMA).
#pragma once
#include "core/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Does the fast path take this problem (validated, on a device of capability 90)? Host facts only: shapes, strides,
// alignment. Whatever it declines is the portable kernel's.
bool conv3x3_takes(const Conv2dParams& p);

// Launches on `stream` of the current device, which `device` describes. Needs conv3x3_takes(p), no workspace: partial
// sums travel through the shared memory of a thread block cluster.
Status conv3x3(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
