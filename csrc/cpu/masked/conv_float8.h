// sparse_conv2d_quantized of float8_e4m3fn on the CPU, whose processors do not multiply it.
#pragma once
#include "core/masked/conv_quantized.h"

namespace sbnet {

int64_t float8_conv_workspace_bytes(const QuantizedConv2dParams& p, int32_t threads);
// For validated params; leaves the fringe alone.
void run_float8_conv(const QuantizedConv2dParams& p, void* workspace, const Parallel& parallel);

}  // namespace sbnet
