// The Hopper 1x1 convolution for many tiles and many channels.
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Of a convolution that conv1x1 serves: is this the faster way?
bool conv1x1_wide_pays(const Conv2dParams& p, const DeviceInfo& device);

// As conv1x1. Needs conv1x1_wide_pays(p, device).
Status conv1x1_wide(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
