// A convolution as part of another layer: its params are that layer's to validate.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

int64_t conv_workspace_bytes(const Conv2dParams& p, int32_t threads);
void run_conv(const Conv2dParams& p, void* workspace, const Parallel& parallel);

}  // namespace sbnet
