// A layout as bits of 64 keys: what a tile of the CPU and portable CUDA kernels asks.
#pragma once
#include "core/attention/attention.h"

namespace sbnet {

constexpr int32_t kAttentionTile = 64;

// Bits [first, last] of a word, both clamped to it.
SBNET_HOST_DEVICE inline uint64_t bit_range(int32_t first, int32_t last) {
  first = first > 0 ? first : 0;
  if (last < first || first > 63) return 0;
  return (last >= 63 ? ~uint64_t{0} : (uint64_t{1} << (last + 1)) - 1) & (~uint64_t{0} << first);
}

// Bit i: are query q and key k0 + i in a block that is multiplied? k0 is a multiple of 64.
SBNET_HOST_DEVICE inline uint64_t active_keys(const AttentionLayout& a, int64_t plane, int32_t q, int32_t k0) {
  if (!a.rows) return ~uint64_t{0};
  const int64_t row = plane * a.q_blocks + q / a.block;
  const int32_t first = k0 / a.block;
  const uint32_t word = a.rows[row * a.row_words() + first / 32] >> first % 32;
  if (a.block >= 64) return word & 1 ? ~uint64_t{0} : 0;
  uint64_t bits = 0;
  for (int32_t i = 0; i < 64 / a.block; ++i)
    if (word >> i & 1) bits |= ((uint64_t{1} << a.block) - 1) << i * a.block;
  return bits;
}

// `bits` without the keys that the element masks hide.
SBNET_HOST_DEVICE inline uint64_t apply_masks(const AttentionLayout& a, int32_t head, int32_t q, int32_t k0,
                                              uint64_t bits) {
  const int64_t row = (a.heads > 1 ? head : 0) * int64_t{a.q_blocks} + q / a.block;
  for (int32_t i = 0; i < 64; i += a.block) {
    const int32_t column = (k0 + i) / a.block;
    if (column >= a.k_blocks) break;
    const int32_t at = a.mask_index[row * a.k_blocks + column];
    if (at < 0 || at >= a.mask_count) continue;
    const uint32_t* words = a.masks + (int64_t{at} * a.block + q % a.block) * a.mask_words() + k0 % a.block / 32;
    if (a.block >= 64) return bits & (words[0] | uint64_t{words[1]} << 32);
    const uint64_t all = (uint64_t{1} << a.block) - 1;
    bits &= ~(all << i) | (words[0] & all) << i;
  }
  return bits;
}

// Bit i: does query q see key k0 + i? k0 is a multiple of 64, `plane` is layout.plane(), keys from k_length on are not
// there.
SBNET_HOST_DEVICE inline uint64_t visible_keys(const AttentionLayout& a, int64_t plane, int32_t head, int32_t q,
                                               int32_t k0, int32_t k_length) {
  const KeyRange range = key_range(a.rule, q, k_length);
  uint64_t bits = bit_range(range.first - k0, range.last - k0);
  if (a.rule.stride && bits) {
    const int32_t reach = q + a.rule.diagonal;
    uint64_t hits = a.rule.band == kNoBand ? bits : bit_range(reach - a.rule.band + 1 - k0, range.last - k0);
    // The last key of the word that is a multiple of the stride away.
    int32_t k =
        reach - k0 <= 63 ? reach : reach - (reach - k0 - 63 + a.rule.stride - 1) / a.rule.stride * a.rule.stride;
    for (; k >= k0; k -= a.rule.stride) hits |= uint64_t{1} << (k - k0);
    bits &= hits;
  }
  if (bits) bits &= active_keys(a, plane, q, k0);
  return bits && a.mask_index ? apply_masks(a, head, q, k0, bits) : bits;
}

// May some of queries q0 ... q0 + queries - 1 see one of keys k0 ... k0 + 63? Never false where one does.
SBNET_HOST_DEVICE inline bool tile_touched(const AttentionLayout& a, int64_t plane, int32_t q0, int32_t queries,
                                           int32_t k0) {
  if (!rule_touches(a.rule, q0, q0 + queries - 1, k0, k0 + 63)) return false;
  if (!a.rows) return true;
  const int32_t first = k0 / a.block, count = a.block < 64 ? 64 / a.block : 1;
  const uint32_t wanted = (1u << count) - 1;
  const int32_t last = (q0 + queries - 1) / a.block;
  for (int32_t i = q0 / a.block; i <= last && i < a.q_blocks; ++i)
    if (a.rows[(plane * a.q_blocks + i) * a.row_words() + first / 32] >> first % 32 & wanted) return true;
  return false;
}

// Of queries [q0, q0 + queries) and keys [k0, k0 + keys) below the ends: may some pair be visible; are all of them, and
// are all keys below their end? mask_plane: of mask_index.
struct Pairs {
  bool any, all;
};
SBNET_HOST_DEVICE inline Pairs pairs_of(const AttentionLayout& a, int64_t plane, int64_t mask_plane, int32_t q0,
                                        int32_t queries, int32_t q_end, int32_t k0, int32_t keys, int32_t k_end) {
  const int32_t q1 = (q0 + queries < q_end ? q0 + queries : q_end) - 1;
  const int32_t k1 = (k0 + keys < k_end ? k0 + keys : k_end) - 1;
  if (q1 < q0 || k1 < k0 || !rule_touches(a.rule, q0, q1, k0, k1)) return {false, false};
  Pairs pairs = {!a.rows, rule_covers(a.rule, q0, q1, k0, k1) && k0 + keys <= k_end};
  if (!a.rows) return pairs;
  for (int32_t i = q0 / a.block; i <= q1 / a.block; ++i) {
    const uint32_t* row = a.rows + (plane * a.q_blocks + i) * a.row_words();
    for (int32_t j = k0 / a.block; j <= k1 / a.block; ++j) {
      const bool active = row[j >> 5] >> (j & 31) & 1;
      pairs.any |= active;
      pairs.all &= active;
      if (active && a.mask_index)
        pairs.all &= static_cast<uint32_t>(a.mask_index[(mask_plane * a.q_blocks + i) * a.k_blocks + j]) >=
                     static_cast<uint32_t>(a.mask_count);
    }
  }
  return pairs;
}

}  // namespace sbnet
