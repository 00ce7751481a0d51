// Which keys a query attends to: blocks of a bitmap, and within them a rule, rows of bits, or both.
// Positions are int32: a sequence has at most 2^29 of them, so that sums of a position and a limit do not overflow.
#pragma once
#include "core/kernels.h"

namespace sbnet {

constexpr int32_t kNoDiagonal = 1 << 30, kNoBand = INT32_MAX;
constexpr int64_t kMaxAttentionLength = 1 << 29;

// Key k is visible to query q if k < prefix, or if k <= q + diagonal and either k > q + diagonal - band or
// (q + diagonal - k) % stride == 0.
struct AttentionRule {
  int32_t diagonal;  // 0: causal; kNoDiagonal: all keys after the query too
  int32_t band;      // kNoBand: all keys up to the diagonal
  int32_t prefix;    // keys that every query sees; 0 with a band or a stride
  int32_t stride;    // 0: none; else keys below the band at multiples of it (the merged head of Sparse Transformers)
  // Attention within each of `phases` interleaved sequences: position p = i*phases + j is position i of sequence j,
  // and all of the above holds for i. That is strided attention at 1/phases of the cost of dense; 1: none of it.
  int32_t phases;
};

// The blocks, all pointers on the op's device. Block (i, j) covers queries i*block ... and keys j*block ....
struct AttentionLayout {
  AttentionRule rule;
  int32_t block;               // 8, 16, 32, 64 or 128
  int32_t q_blocks, k_blocks;  // ceil(length / block), for the lengths of one phase
  int32_t batches, heads;      // 1 (shared) or those of q
  // Bit j % 32 of word j / 32 of row i: are queries of block i and keys of block j multiplied? Bits past the last block
  // may hold anything. Null (both): every block, as far as the rule goes; then block is 64.
  const uint32_t* rows;     // [batches, heads, q_blocks, ceil(k_blocks / 32)]
  const uint32_t* columns;  // [batches, heads, k_blocks, ceil(q_blocks / 32)] the same transposed
  // Element masks of blocks, null (both) for none: masks[mask_index[head, i, j]], bit k % 32 of word k / 32 of row q.
  const int32_t* mask_index;  // [heads, q_blocks, k_blocks]; outside 0 ... mask_count-1: all elements are visible
  const uint32_t* masks;      // [mask_count, block, ceil(block / 32)]
  int32_t mask_count;

  SBNET_HOST_DEVICE int32_t row_words() const { return (k_blocks + 31) / 32; }
  SBNET_HOST_DEVICE int32_t column_words() const { return (q_blocks + 31) / 32; }
  SBNET_HOST_DEVICE int32_t mask_words() const { return (block + 31) / 32; }
  // Of batch b (phases not counted) and query head h: which of the batches * heads bitmaps.
  SBNET_HOST_DEVICE int64_t plane(int64_t b, int32_t h) const {
    return (batches > 1 ? b : 0) * heads + (heads > 1 ? h : 0);
  }
};

// The keys that query q may see lie in [first, last]; all of them are visible unless the rule has a stride.
struct KeyRange {
  int32_t first, last;
};
SBNET_HOST_DEVICE inline KeyRange key_range(const AttentionRule& r, int32_t q, int32_t k_length) {
  const int32_t reach = q + r.diagonal, last = reach > r.prefix - 1 ? reach : r.prefix - 1;
  const int32_t first = r.band == kNoBand || r.stride ? 0 : reach - r.band + 1;
  return {first > 0 ? first : 0, last < k_length - 1 ? last : k_length - 1};
}

// Of queries [q0, q1] and keys [k0, k1]: may some pair be visible; are all of them?
SBNET_HOST_DEVICE inline bool rule_touches(const AttentionRule& r, int32_t q0, int32_t q1, int32_t k0, int32_t k1) {
  if (k0 < r.prefix) return true;
  const int32_t nearest = q0 + r.diagonal - k1, farthest = q1 + r.diagonal - k0;
  if (farthest < 0) return false;
  if (nearest < r.band) return true;
  return r.stride && farthest / r.stride * r.stride >= nearest;
}
SBNET_HOST_DEVICE inline bool rule_covers(const AttentionRule& r, int32_t q0, int32_t q1, int32_t k0, int32_t k1) {
  if (k1 < r.prefix) return true;
  return q0 + r.diagonal >= k1 && q1 + r.diagonal - k0 < r.band;
}

// blocks -> rows and columns of the layout, in one launch.
struct PackAttentionBlocksParams {
  const uint8_t* blocks;  // [planes, q_blocks, k_blocks] bool, contiguous
  uint32_t* rows;         // [planes, q_blocks, ceil(k_blocks / 32)] out; bits past the last block are 0
  uint32_t* columns;      // [planes, k_blocks, ceil(q_blocks / 32)] out
  int64_t planes;
  int32_t q_blocks, k_blocks;
};

SBNET_EXPORT Status validate(const PackAttentionBlocksParams& p);
// `batch`, `heads`: of q; lengths of one phase.
Status validate(const char* op, const AttentionLayout& layout, int64_t batch, int32_t heads, int32_t q_length,
                int32_t k_length);

}  // namespace sbnet

SBNET_DECLARE(pack_attention_blocks, PackAttentionBlocksParams)
