// Attention to all listed keys by Hopper's own kernel, where heads are narrow and nothing is added to scores.
#pragma once
#include "core/attention/attention.h"
#include "core/attention/window_attention.h"
#include "cuda/common.cuh"

namespace sbnet::sm90 {

// Strides in elements; `stride`: from a position to the next.
struct ListedTensor {
  void* data;
  int64_t batch_stride, head_stride;
  uint32_t stride;
};

// Which positions of a tensor an image has.
struct ListedRows {
  const int64_t* order;    // [batch, step] the first `lengths` of them are listed; null: the first positions
  const int32_t* lengths;  // [batch], null: capacity
  int64_t step;
  int32_t capacity, positions;
};

struct ListedAttention {
  const char* op;
  ListedTensor q, k, v, out;
  ListedRows rows, keys;
  int64_t batch;
  int32_t heads, heads_per_kv, dim, value_dim;
  float* lse;   // [batch, heads, capacity] or null
  float scale;  // times log2(e)
  bool clear;   // positions behind those of an image, which has no order, become zeros
  uint32_t tiles;
};

// Do these problems (validated for CUDA) run so? Whatever is declined is another kernel's.
bool listed_attention_takes(const WindowAttentionParams& p);
bool listed_attention_takes(const AttentionParams& p);
Status listed_attention(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream);
Status listed_attention(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream);

}  // namespace sbnet::sm90
