// The 3x3 convolution of stride 2 for Hopper.
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Of a convolution of stride 2 that conv3x3 serves: is this the faster way?
bool conv3x3_stride2_pays(const Conv2dParams& p, const DeviceInfo& device);

// As conv3x3. Needs conv3x3_stride2_pays(p, device).
Status conv3x3_stride2(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
