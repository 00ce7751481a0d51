// Transposed convolution for Hopper: all phases of the output in one launch; fp16 and bf16.
#pragma once
#include "core/masked/conv_transpose.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Launches on `stream` of the current device, which `device` describes. p is valid, and hopper_transpose_declines()
// has not refused it.
Status conv_transpose(const ConvTransposeParams& p, const DeviceInfo& device, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
