// Which weights are dropped, by dropout_bits() of core/attention/attention.h. A call of Philox says so for a query
// and 8 keys: the lanes of a warp that share them share the call.
#pragma once
#include "core/attention/attention.h"
#include "cuda/sm90/attention/ptx.cuh"

namespace sbnet::sm90::attention {

struct DropoutArgs {
  const int64_t* seed;  // null: none
  uint32_t threshold;
  float scale;  // 1 / (1 - p)
};

// A thread's dropped pairs as two words, of its rows `row` and row + 8: bit 2n + e is column 8n + 2 (lane % 4) + e.
struct Dropper {
  uint64_t key, offset;
  uint32_t threshold;

  __device__ __forceinline__ explicit Dropper(const DropoutArgs& a)
      : key(static_cast<uint64_t>(a.seed[0])), offset(static_cast<uint64_t>(a.seed[1])), threshold(a.threshold) {}

  // Bit i: the pair with key 8 octet + i.
  __device__ __forceinline__ uint32_t octet(uint32_t plane, uint32_t q, uint32_t octet) const {
    const PhiloxWords words = dropout_bits(key, offset, plane, q, octet);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(is_dropped(words, i, threshold)) << i;
    return bits;
  }

  // Rows are queries; column c is key key_of(c). Four lanes share a query: each makes a quarter of its octets.
  template <int kColumns, class KeyOf>
  __device__ __forceinline__ void of_queries(uint32_t plane, int q, int lane, KeyOf&& key_of,
                                             uint32_t (&drop)[2]) const {
    uint32_t made[2] = {0, 0};
#pragma unroll
    for (int m = 0; m < kColumns / 32; ++m) {
      const uint32_t at = static_cast<uint32_t>(key_of(32 * m + 8 * (lane & 3))) >> 3;
#pragma unroll
      for (int r = 0; r < 2; ++r) made[r] |= octet(plane, q + 8 * r, at) << 8 * m;
    }
    drop[0] = drop[1] = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        drop[r] |= (__shfl_sync(~0u, made[r], (lane & ~3) + n) >> (lane & 3) * 2 & 0x03030303u) << 2 * n;
  }
  // Rows are keys, 64 columns from q on queries. Eight lanes share a query and two octets.
  __device__ __forceinline__ void of_keys(uint32_t plane, int row, int q, int lane, uint32_t (&drop)[2]) const {
    uint32_t made = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        made |= octet(plane, q + 8 * (lane >> 2) + 2 * (lane & 3) + e, (row >> 3) + r) << 8 * (2 * e + r);
    drop[0] = drop[1] = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint32_t bits = __shfl_sync(~0u, made, 4 * n + (lane & 3)) >> (lane >> 2);
      drop[0] |= (bits & 1 | bits >> 15 & 2) << 2 * n;
      drop[1] |= (bits >> 8 & 1 | bits >> 23 & 2) << 2 * n;
    }
  }
};

}  // namespace sbnet::sm90::attention
