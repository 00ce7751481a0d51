// The general convolution for Hopper: any kernel, stride, dilation, groups, channels and blocks, fp16, bf16 and, where
// p.allow_tf32, float32.
#pragma once
#include "core/masked/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. select_conv() must have chosen it, or
// hopper_general_declines() not have refused p. It takes any strides of rows and columns, so y may be a phase of a
// larger plane: p.padding is what lies before a row or column (negative: that much is left out), y's size how far the
// output goes; neither has to follow from the other.
Status conv_general(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

Status conv_tf32(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);  // of float32

}  // namespace sm90
}  // namespace sbnet
