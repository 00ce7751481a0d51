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

// Of 32 queries from q on: those whose rule lets them see a key.
__device__ __forceinline__ uint32_t queries_that_see(const AttentionRule& r, uint32_t period, int key, int q) {
  if (key < r.prefix) return ~0u;
  const int first = key - r.diagonal - q, from = max(first, 0);  // distance 0 is at `first`
  uint32_t m = bit_run(from, max(r.band - (from - first), 0));
  if (r.stride) {
    const int hit = first >= 0 ? first : (r.stride - -first % r.stride) % r.stride;
    m |= hit < 32 ? period << hit : 0u;
  }
  return m;
}
// Of 32 columns from `column` on: the bits of their blocks of 16 or 32 in a row of a bitmap.
__device__ __forceinline__ uint32_t bits_of_blocks(const uint32_t* bits, int column, int block) {
  const int j = column / block;
  const uint32_t word = bits[j >> 5] >> (j & 31);
  if (block == 32) return word & 1 ? ~0u : 0u;
  return (word & 1 ? 0xFFFFu : 0u) | (word & 2 ? 0xFFFF0000u : 0u);
}

// The words of a thread of the backward: its rows, row and row + 8, are queries and the columns keys, or the other way
// round. Shifted right by 2 (lane % 4), of which it tests the bits 8n and 8n + 1.
template <bool kRowsAreQueries>
struct SeenWords {
  const AttentionLayout& layout;
  uint32_t period;
  int64_t bitmap, mask_plane;
  int q_end, k_end;

  __device__ __forceinline__ SeenWords(const AttentionLayout& of, uint32_t ones, int b, int h, int queries, int keys)
      : layout(of),
        period(ones),
        bitmap(of.plane(b, h)),
        mask_plane(of.heads > 1 ? h : 0),
        q_end(queries),
        k_end(keys) {}

  // met: is the block of 64 rows and 64 columns active?
  __device__ __forceinline__ void see(bool met, int row, int column, int lane, uint32_t& first,
                                      uint32_t& second) const {
    uint32_t m[2];
    const bool small = layout.rows && layout.block < 64;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + 8 * r;
      m[r] = 0;
      if (kRowsAreQueries && met && at < q_end) {
        const KeyRange range = key_range(layout.rule, at, k_end);
        const int from = max(range.first - column, 0);
        m[r] = within_rule(layout, period, at, column, bit_run(from, max(range.last - column + 1 - from, 0)));
        if (small && m[r])
          m[r] &= bits_of_blocks(layout.rows + (bitmap * layout.q_blocks + at / layout.block) * layout.row_words(),
                                 column, layout.block);
        if (layout.masks && m[r]) m[r] = within_masks_32(at, column, m[r]);
      }
      if (!kRowsAreQueries && met && at < k_end && column < q_end) {
        m[r] = queries_that_see(layout.rule, period, at, column);
        if (small && m[r])
          m[r] &=
              bits_of_blocks(layout.columns + (bitmap * layout.k_blocks + at / layout.block) * layout.column_words(),
                             column, layout.block);
      }
    }
    if (!kRowsAreQueries && layout.masks && (m[0] | m[1])) within_masks_of_keys(row, column, lane, m);
    first = m[0] >> (lane & 3) * 2, second = m[1] >> (lane & 3) * 2;
  }

 private:
  __device__ __forceinline__ uint32_t within_masks_32(int q, int key, uint32_t m) const {
    if (layout.block > 16) return within_masks(layout, mask_plane, q, key, m);
    const uint32_t low = m & 0xFFFF, high = m >> 16;
    return (low ? within_masks(layout, mask_plane, q, key, low) : 0) |
           (high ? within_masks(layout, mask_plane, q, key + 16, high) << 16 : 0);
  }
  // Keys row and row + 8, which share a word of a mask, and of 32 queries those that this lane tests.
  __device__ __forceinline__ void within_masks_of_keys(int row, int column, int lane, uint32_t (&m)[2]) const {
    const int block = layout.block, words = layout.mask_words(), j = row / block, key = row - j * block;
#pragma unroll
    for (int half = 0; half < 32; half += 16) {
      const int q = column + half, i = q / block;
      if (q >= q_end) continue;
      const int index = layout.mask_index[(mask_plane * layout.q_blocks + i) * layout.k_blocks + j];
      if (static_cast<uint32_t>(index) >= static_cast<uint32_t>(layout.mask_count)) continue;
      const uint32_t* mask = layout.masks + (int64_t{index} * block + q - i * block) * words + key / 32;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int bit = e / 2 * 8 + (lane & 3) * 2 + e % 2;
        const uint32_t hidden = ~(mask[bit * words] >> key % 32);
        m[0] &= ~((hidden & 1) << (half + bit)), m[1] &= ~((hidden >> 8 & 1) << (half + bit));
      }
    }
  }
};

}  // namespace sbnet::sm90::attention
