// Products with block-sparse weights on Hopper: fp16 and bf16 (TMA + WGMMA), by plans made once per layout.
#pragma once
#include "core/weights/matmul.h"

struct CUstream_st;
namespace sbnet {
struct DeviceInfo;
}

namespace sbnet::sm90 {

// Does the fast path take this problem (validated, on a device of capability 90)? Host facts only: shapes, strides,
// alignment, density, whether there is a plan. Whatever it declines is the portable kernel's. Weights beyond the input
// features must be finite: x has only zeros against them.
bool blocksparse_matmul_takes(const BlocksparseMatmulParams& p);
bool blocksparse_weight_grad_takes(const BlocksparseWeightGradParams& p);

// Bytes of workspace that the launch needs, 0 for none. Weights arrive with their gates multiplied in; p.gate, where it
// is there, still says which blocks to skip.
int64_t blocksparse_matmul_workspace_bytes(const BlocksparseMatmulParams& p, const DeviceInfo& device);
int64_t blocksparse_weight_grad_workspace_bytes(const BlocksparseWeightGradParams& p, const DeviceInfo& device);

// Launch on `stream` of the current device, which `device` describes. Need *_takes(p).
Status blocksparse_matmul(const BlocksparseMatmulParams& p, const DeviceInfo& device, void* workspace,
                          CUstream_st* stream);
Status blocksparse_weight_grad(const BlocksparseWeightGradParams& p, const DeviceInfo& device, void* workspace,
                               CUstream_st* stream);

}  // namespace sbnet::sm90
