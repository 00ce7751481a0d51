// Convolutions with block-sparse weights for Hopper: blocks that are squares of a grid, fp16 and bf16.
#pragma once
#include "core/weights/conv.h"

struct CUstream_st;

namespace sbnet {
struct DeviceInfo;

namespace sm90 {

// Of the filters as these kernels read them, side `to` the outputs: the workspace where a call brings none.
int64_t conv_blocksparse_packed_bytes(const BlocksparseConvShape& s, int to);
Status pack_blocksparse(const BlocksparsePackParams& p, const DeviceInfo& device, CUstream_st* stream);
// Launches on `stream` of the current device, which `device` describes. hopper_blocksparse_conv_declines() must not
// have refused p.
Status conv_blocksparse(const BlocksparseConvParams& p, const DeviceInfo& device, void* workspace, CUstream_st* stream);

}  // namespace sm90
}  // namespace sbnet
