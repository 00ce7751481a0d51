// The Hopper 1x1 convolution for few tiles of many input channels.
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Of a convolution that conv1x1 serves: are there channels enough for it? With few tiles it is the faster way then.
bool conv1x1_split_takes(const Conv2dParams& p);

// As conv1x1. Needs conv1x1_split_takes(p).
Status conv1x1_split(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
