// The fast Hopper path of block-sparse attention (TMA + WGMMA), forward and backward.
#pragma once
#include "core/attention/attention.h"

struct CUstream_st;
namespace sbnet {
struct DeviceInfo;
}

namespace sbnet::sm90 {

// Does the fast path take this problem (validated, on a device of capability 90)? Host facts only: shapes, strides,
// dtypes, the rule. Whatever it declines is the portable kernel's.
bool block_attention_takes(const AttentionParams& p);
bool block_attention_backward_takes(const AttentionBackwardParams& p);

// Scratch for problems that it takes, among it the lists of tiles, made from the layout's bitmaps at every call: a few
// microseconds, and nothing to keep up to date where the layout changes at every step.
int64_t block_attention_workspace_bytes(const AttentionParams& p);
int64_t block_attention_backward_workspace_bytes(const AttentionBackwardParams& p);

Status block_attention(const AttentionParams& p, void* workspace, const DeviceInfo& device, CUstream_st* stream);
Status block_attention_backward(const AttentionBackwardParams& p, void* workspace, const DeviceInfo& device,
                                CUstream_st* stream);

}  // namespace sbnet::sm90
