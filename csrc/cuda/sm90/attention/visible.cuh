// Which keys a query sees: words of 32 keys, in the order of their bits.
#pragma once
#include "core/attention/attention.h"
#include "cuda/sm90/attention/ptx.cuh"

namespace sbnet::sm90::attention {

// Of the keys `m` from `key` on, all of them within the query's key_range(): those that the rule's stride leaves.
// period: ones at multiples of the stride.
__device__ __forceinline__ uint32_t within_rule(const AttentionLayout& layout, uint32_t period, int q, int key,
                                                uint32_t m) {
  const AttentionRule& r = layout.rule;
  if (!r.stride) return m;
  const int reach = q + r.diagonal - key, first = max(reach, 0) % r.stride;  // the first hit is at `first`
  const int band = max(reach - r.band + 1, 0);
  return m & (bit_run(band, 32) | (first < 32 ? period << first : 0u));
}
// Those that element masks leave; `key` is a multiple of 16, and `m` has bits of one block only.
__device__ __forceinline__ uint32_t within_masks(const AttentionLayout& layout, int64_t mask_plane, int q, int key,
                                                 uint32_t m) {
  const int i = q / layout.block, j = key / layout.block;
  const int index = layout.mask_index[(mask_plane * layout.q_blocks + i) * layout.k_blocks + j];
  if (static_cast<uint32_t>(index) >= static_cast<uint32_t>(layout.mask_count)) return m;
  const int words = layout.mask_words();
  return m &
         layout.masks[(int64_t{index} * layout.block + q - i * layout.block) * words + (key - j * layout.block) / 32];
}

}  // namespace sbnet::sm90::attention
