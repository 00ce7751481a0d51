// Convolutions with block-sparse weights whose filters are 3x3, of stride 1, by the products that sparse_conv2d takes
// for such layers: its tiles and kernels (cpu/masked/conv_winograd.h), with weights for the blocks alone.
#pragma once
#include "core/weights/conv.h"

namespace sbnet {

// For params and tables that were checked.
bool suits_winograd(const BlocksparseConvParams& p);
int64_t winograd_workspace_bytes(const BlocksparseConvParams& p, int32_t threads);
void convolve_by_winograd(const BlocksparseConvParams& p, char* workspace, const Parallel& parallel);

}  // namespace sbnet
