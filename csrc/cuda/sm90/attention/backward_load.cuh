// What the backward kernels are made of, and their producer warps.
#pragma once
#include "cuda/sm90/attention/dropout.cuh"
#include "cuda/sm90/attention/lists.cuh"
#include "cuda/sm90/attention/ptx.cuh"

namespace sbnet::sm90::attention {

// Own: what a tile's warpgroups keep in shared memory: K and V, or Q and dO in the pass for dQ. Met: the other two,
// which the ring brings.
struct BackwardMaps {
  CUtensorMap own[2], met[2], grad[2];  // (D, position of a phase, phase, head, batch)
};

struct BackwardArgs {
  Lists lists;
  AttentionLayout layout;
  const int32_t *q_lengths, *k_lengths;
  const float *lse2, *delta;  // [(batch, head, phase), padded]
  float* sums;                // of dQ: [(batch, head, phase), padded / 64, D / 64, 4096], as the fragments of WGMMA are
  int32_t planes, together;   // of own tiles; how many at a time: what they add to stays in the L2
  int32_t heads, kv_heads, q_length, k_length, padded;
  uint32_t stride_period;  // ones at multiples of the rule's stride
  float scale, scale_log2;
  DropoutArgs dropout;
};

enum class Pass {
  kBulk,     // dK, dV and, by bulk sums from shared memory, dQ
  kVector,   // the same, by sums of four floats from registers
  kKeys,     // dK and dV
  kQueries,  // dQ, roles exchanged: a warpgroup owns 64 queries and meets keys
};

template <class T_, int kDim_, int kMet_, int kWarpgroups_, int kGroups_, int kStages_, int kBuffers_, Pass kPass_,
          bool kRounded_ = false, bool kDropout_ = false>
struct BackwardConfig {
  using T = T_;
  static constexpr int kDim = kDim_, kMet = kMet_, kWarpgroups = kWarpgroups_, kGroups = kGroups_;
  static constexpr int kStages = kStages_, kBuffers = kBuffers_;  // tiles met; of dS
  static constexpr Pass kPass = kPass_;
  static constexpr bool kRounded = kRounded_;  // dS from the 16-bit P, which saves registers
  static constexpr bool kDropout = kDropout_;
  static_assert(!kDropout || (!kRounded && kMet == 64));
  static constexpr bool kQueries = kPass == Pass::kQueries, kAdds = kPass == Pass::kBulk || kPass == Pass::kVector;
  static constexpr int kConsumers = kGroups * kWarpgroups, kThreads = 128 + kConsumers * 128;
  static constexpr int kOwn = 64 * kWarpgroups, kChunks = kDim / 64, kMetCells = kMet / 64;
  static constexpr int kPieces = kMetCells * kChunks / kWarpgroups;  // 64 x 64, of dQ, for a warpgroup
  static constexpr int kOwnBytes = kOwn * kDim * 2, kTileBytes = kMet * kDim * 2, kScoreBytes = kMet * kOwn * 2;
  static constexpr int kGroupBytes =
      2 * kOwnBytes + kStages * kTileBytes + kBuffers * kScoreBytes + (kPass == Pass::kBulk ? kWarpgroups * 16384 : 0);
  static constexpr int kRowBytes = kQueries ? 0 : kMet * 4;  // of lse2 or delta, in a stage
  static constexpr int kControlBytes = (kStages * (kRowBytes + 24) + 32 + 15) / 16 * 16;
  static constexpr int kBytes = kGroups * (kGroupBytes + kControlBytes);
  static constexpr int kRegisters = kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static_assert(kBytes <= 227 * 1024);
};

constexpr int kMaskedEntry = 1 << (kEntryShift - 1);  // the flag in a stage's entry

struct HeadPlane {
  int b, h, j;
};
__device__ __forceinline__ HeadPlane head_plane(int plane, int heads, int phases) {
  const int bh = plane / phases, b = bh / heads;
  return {b, bh - b * heads, plane - bh * phases};
}

// What a group's warps share.
template <class C>
struct BackwardShared {
  uint32_t own, ring, scores, rows, own_full, own_empty, full, empty;
  int4* tile;   // first row, plane, nothing, entries (-1: the end)
  int2* words;  // [kStages] entry, plane of the queries

  __device__ __forceinline__ BackwardShared(uint8_t* shared, int group) {
    const uint32_t base = smem_address(shared), control = C::kGroups * C::kGroupBytes + group * C::kControlBytes;
    own = base + group * C::kGroupBytes, ring = own + 2 * C::kOwnBytes;
    scores = ring + C::kStages * C::kTileBytes, rows = base + control;
    const uint32_t after = control + C::kStages * C::kRowBytes;
    tile = reinterpret_cast<int4*>(shared + after);
    own_full = base + after + 16, own_empty = own_full + 8;
    full = own_full + 16, empty = full + 8 * C::kStages;
    words = reinterpret_cast<int2*>(shared + after + 32 + 16 * C::kStages);
  }
};

template <class C>
__device__ __forceinline__ void produce_backward(const BackwardArgs& a, const BackwardMaps& maps,
                                                 const BackwardShared<C>& s) {
  const int lane = threadIdx.x & 31, phases = a.layout.rule.phases, total = a.lists.tiles * a.planes;
  const int group = a.heads / a.kv_heads;  // query heads of a key head
  const int own_heads = C::kQueries ? a.heads : a.kv_heads, lists = C::kQueries ? 1 : group;  // of a tile
  uint32_t slot = 0, phase = 1, own_phase = 1;
  while (true) {
    int n = lane == 0 ? atomicAdd(a.lists.next, 1) : 0;
    n = __shfl_sync(~0u, n, 0);
    if (n >= total) break;
    // `together` planes at a time; among those, the longest tiles of all come first.
    const int set = n / (a.lists.tiles * a.together), rest = n - set * a.lists.tiles * a.together;
    const int planes = min(a.together, a.planes - set * a.together), index = rest / planes;
    const int plane = set * a.together + rest - index * planes;
    const HeadPlane at = head_plane(plane, own_heads, phases);
    const int first_head = at.h * lists;
    const int4 record = a.lists.records[a.lists.plane(at.b, first_head, at.j) * a.lists.tiles + index];
    const int tile = record.x;
    int entries = record.y + record.z;
    for (int g = 1; g < lists; ++g) {
      const int2 counts = a.lists.counts[a.lists.plane(at.b, first_head + g, at.j) * a.lists.tiles + tile];
      entries += counts.x + counts.y;
    }
    // The entries of one query head after the other's: those that need the mask, from the list's start, then the rest,
    // from its end.
    int head = first_head, e = 0, masked = record.y, length = record.y + record.z;
    const auto list_of = [&] {
      return (a.lists.plane(at.b, head, at.j) * a.lists.tiles + tile) * a.lists.capacity + a.lists.entries;
    };
    const uint32_t* list = list_of();
    auto next_entry = [&]() -> int {
      while (e == length) {
        ++head, e = 0, list = list_of();
        const int2 counts = a.lists.counts[a.lists.plane(at.b, head, at.j) * a.lists.tiles + tile];
        masked = counts.x, length = counts.x + counts.y;
      }
      const bool needs_mask = e < masked;
      const uint32_t entry = needs_mask ? list[e] : list[a.lists.capacity - 1 - (e - masked)];
      ++e;
      return static_cast<int>(entry) | (needs_mask ? kMaskedEntry : 0);
    };
    auto push = [&](int which, int entry, int of_head) {
      mbar_wait(s.empty + 8 * slot, phase);
      if (lane == 0) {
        const int column = (entry >> kEntryShift) * C::kMet, bar = s.full + 8 * slot;
        const int q_plane = (at.b * a.heads + of_head) * phases + at.j;
        if (which == 0) s.words[slot] = make_int2(entry, q_plane);
        mbar_expect(bar, C::kTileBytes + C::kRowBytes);
        for (int d = 0; d < C::kChunks; ++d)
          tma_load(s.ring + slot * C::kTileBytes + d * C::kMet * 128, &maps.met[which], bar, d * 64, column, at.j,
                   C::kQueries ? of_head / group : of_head, at.b);
        if constexpr (!C::kQueries)
          bulk_load(s.rows + slot * C::kRowBytes,
                    (which == 0 ? a.lse2 : a.delta) + int64_t{q_plane} * a.padded + column, C::kRowBytes, bar);
      }
      __syncwarp();
      if (++slot == C::kStages) slot = 0, phase ^= 1;
    };
    int entry = entries > 0 ? next_entry() : 0, of_head = head;
    if (entries > 0) push(0, entry, of_head);  // on its way while the last tile's results leave their buffers
    mbar_wait(s.own_empty, own_phase);
    own_phase ^= 1;
    if (lane == 0) {
      *s.tile = make_int4(tile * C::kOwn, plane, 0, entries);
      mbar_expect(s.own_full, 2 * C::kOwnBytes);
      for (int which = 0; which < 2; ++which)
        for (int d = 0; d < C::kChunks; ++d)
          tma_load(s.own + which * C::kOwnBytes + d * C::kOwn * 128, &maps.own[which], s.own_full, d * 64,
                   tile * C::kOwn, at.j, at.h, at.b);
    }
    __syncwarp();
    for (int i = 0; i < entries; ++i) {
      const int now = entry, now_head = of_head;
      const bool more = i + 1 < entries;
      if (more) entry = next_entry(), of_head = head;  // on its way while this one waits for its stage
      push(1, now, now_head);
      if (more) push(0, entry, of_head);
    }
  }
  mbar_wait(s.own_empty, own_phase);
  if (lane == 0) {
    *s.tile = make_int4(0, 0, 0, -1);
    mbar_arrive(s.own_full);
  }
}

}  // namespace sbnet::sm90::attention
