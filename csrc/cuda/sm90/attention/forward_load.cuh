// What the forward kernel is made of, and its producer warps.
#pragma once
#include "cuda/sm90/attention/dropout.cuh"
#include "cuda/sm90/attention/lists.cuh"
#include "cuda/sm90/attention/ptx.cuh"

namespace sbnet::sm90::attention {

struct ForwardMaps {
  CUtensorMap q, k, v, out;  // (D, position of a phase, phase, head, batch)
};

struct ForwardArgs {
  Lists lists;
  AttentionLayout layout;
  const int32_t *q_lengths, *k_lengths;
  float* lse;
  int32_t planes, together;  // (batch, head, phase)s; how many at a time: their keys and values fit the L2
  int32_t heads, heads_per_kv, q_length, k_length;
  int32_t log_piece;       // of keys, in a box
  uint32_t stride_period;  // ones at multiples of the rule's stride
  float scale;             // times log2(e)
  DropoutArgs dropout;
};

template <class T_, int kDim_, int kKeys_, int kGroups_, int kWarpgroups_, int kQueryStages_, int kStages_,
          bool kTurns_, bool kDropout_ = false>
struct ForwardConfig {
  using T = T_;
  static constexpr int kDim = kDim_, kKeys = kKeys_, kGroups = kGroups_, kWarpgroups = kWarpgroups_;
  static constexpr int kQueryStages = kQueryStages_, kStages = kStages_;
  static constexpr bool kTurns = kTurns_;  // the warpgroups of a group take turns at the tensor cores
  static constexpr bool kDropout = kDropout_;
  static constexpr int kConsumers = kGroups * kWarpgroups, kThreads = 128 + kConsumers * 128;
  static constexpr int kQueries = 64 * kWarpgroups, kChunks = kDim / 64, kMostBoxes = kKeys / 16;
  static constexpr int kQueryBytes = kQueries * kDim * 2, kTileBytes = kKeys * kDim * 2;
  static constexpr int kGroupBytes = kQueryStages * kQueryBytes + kStages * kTileBytes;
  static constexpr int kEntryBytes = kMostBoxes * 4;
  static constexpr int kControlBytes = kQueryStages * 32 + kStages * (16 + kEntryBytes);
  static constexpr int kBytes = kGroups * (kGroupBytes + kControlBytes);
  static constexpr int kRegisters = kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static_assert(kBytes <= 227 * 1024);
};

struct Plane {
  int b, h, j;
};
__device__ __forceinline__ Plane plane_at(const ForwardArgs& a, int plane) {
  const int phases = a.layout.rule.phases, bh = plane / phases, b = bh / a.heads;
  return {b, bh - b * a.heads, plane - bh * phases};
}

// What a group's warps share.
template <class C>
struct ForwardShared {
  uint32_t q, ring, q_full, q_empty, full, empty;
  int4* tiles;  // [kQueryStages] first query, plane, tiles of keys that need the mask, tiles of keys (-1: the end)
  uint32_t* entries;  // [kStages, kMostBoxes]

  __device__ __forceinline__ ForwardShared(uint8_t* shared, int group) {
    const uint32_t base = smem_address(shared), control = C::kGroups * C::kGroupBytes + group * C::kControlBytes;
    q = base + group * C::kGroupBytes, ring = q + C::kQueryStages * C::kQueryBytes;
    tiles = reinterpret_cast<int4*>(shared + control);
    entries = reinterpret_cast<uint32_t*>(tiles + C::kQueryStages);
    q_full = base + control + C::kQueryStages * 16 + C::kStages * C::kEntryBytes;
    q_empty = q_full + 8 * C::kQueryStages, full = q_empty + 8 * C::kQueryStages, empty = full + 8 * C::kStages;
  }
};

template <class C>
__device__ __forceinline__ void produce_forward(const ForwardArgs& a, const ForwardMaps& maps,
                                                const ForwardShared<C>& s) {
  const int lane = threadIdx.x & 31;
  const int boxes = C::kKeys >> a.log_piece, total = a.lists.tiles * a.planes;
  uint32_t slot = 0, phase = 1, q_slot = 0, q_phase = 1;
  struct Unit {
    int tile, plane, masked, full;  // tile -1: none left
    Plane at;
    int64_t list;
  };
  auto claim = [&] { return lane == 0 ? atomicAdd(a.lists.next, 1) : 0; };
  auto unit_of = [&](int claimed) {
    // `together` planes at a time; among those, the longest tiles of all come first.
    const int n = __shfl_sync(~0u, claimed, 0);
    if (n >= total) return Unit{-1};
    const int set = n / (a.lists.tiles * a.together), rest = n - set * a.lists.tiles * a.together;
    const int planes = min(a.together, a.planes - set * a.together), index = rest / planes;
    Unit u;
    u.plane = set * a.together + rest - index * planes;
    u.at = plane_at(a, u.plane);
    const int64_t first = a.lists.plane(u.at.b, u.at.h, u.at.j) * a.lists.tiles;
    const int4 record = a.lists.records[first + index];
    u.tile = record.x, u.masked = record.y, u.full = record.z;
    u.list = first + u.tile;
    return u;
  };
  Unit u = unit_of(claim());
  while (u.tile >= 0) {
    const int q0 = u.tile * C::kQueries, kv_head = u.at.h / a.heads_per_kv, next = claim();
    const uint32_t* entries = a.lists.entries + u.list * a.lists.capacity;
    const int tiles = (u.masked + u.full + boxes - 1) / boxes, full_from = tiles * boxes - u.full;
    const int masked = u.masked, last = a.lists.capacity - 1 + full_from;
    mbar_wait(s.q_empty + 8 * q_slot, q_phase);
    if (lane == 0) {
      s.tiles[q_slot] = make_int4(q0, u.plane, (full_from + boxes - 1) / boxes, tiles);
      mbar_expect(s.q_full + 8 * q_slot, C::kQueryBytes);
      for (int d = 0; d < C::kChunks; ++d)
        tma_load(s.q + q_slot * C::kQueryBytes + d * C::kQueries * 128, &maps.q, s.q_full + 8 * q_slot, d * 64, q0,
                 u.at.j, u.at.h, u.at.b);
    }
    if (++q_slot == C::kQueryStages) q_slot = 0, q_phase ^= 1;
    auto entry = [&](int tile) -> uint32_t {  // of this lane's box: what needs the mask, nothing, the rest
      const int e = tile * boxes + lane;
      return lane >= boxes ? 0 : e < masked ? entries[e] : e < full_from ? kNoPiece : entries[last - e];
    };
    const int j = u.at.j, b = u.at.b;
    auto push = [&](const CUtensorMap* map, uint32_t word, bool keys) {
      mbar_wait(s.empty + 8 * slot, phase);
      if (keys && lane < boxes) s.entries[slot * C::kMostBoxes + lane] = word;
      __syncwarp();
      if (lane == 0) mbar_expect(s.full + 8 * slot, C::kTileBytes);
      __syncwarp();
      const int box = lane & (boxes - 1), d = lane / boxes;
      const uint32_t piece = __shfl_sync(~0u, word, box) >> kEntryShift;
      if (d < C::kChunks)
        tma_load(s.ring + slot * C::kTileBytes + d * C::kKeys * 128 + (box << a.log_piece) * 128, map,
                 s.full + 8 * slot, d * 64, static_cast<int>(piece << a.log_piece), j, kv_head, b);
      if (++slot == C::kStages) slot = 0, phase ^= 1;
    };
    uint32_t word = tiles > 0 ? entry(0) : 0, before = 0;
    for (int n = 0; n < tiles; ++n) {  // K0, K1, V0, K2, V1, ...
      const uint32_t ahead = n + 1 < tiles ? entry(n + 1) : 0;
      push(&maps.k, word, true);
      if (n > 0) push(&maps.v, before, false);
      before = word, word = ahead;
    }
    u = unit_of(next);
    if (lane == 0 && u.tile >= 0)  // the next queries on their way while their buffer is busy
      for (int d = 0; d < C::kChunks; ++d) tma_prefetch(&maps.q, d * 64, u.tile * C::kQueries, u.at.j, u.at.h, u.at.b);
    if (tiles > 0) push(&maps.v, before, false);
  }
  mbar_wait(s.q_empty + 8 * q_slot, q_phase);
  if (lane == 0) {
    s.tiles[q_slot] = make_int4(0, 0, 0, -1);
    mbar_arrive(s.q_full + 8 * q_slot);
  }
}

}  // namespace sbnet::sm90::attention
