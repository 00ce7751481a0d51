// How a launch of the fused bottleneck block is cut: its arguments and shared memory. See bottleneck.cu.
#pragma once
#include <algorithm>

#include "core/masked/bottleneck.h"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90::bottleneck_detail {

constexpr int kMaxSlices = 8, kMaxStages = 40, kLeastStages = 6, kMaxBuffers = 6,
              kMaxWidth = 128;  // the limits of hopper_bottleneck_declines()
constexpr int kPatchSide = 10, kPatchPixels = kPatchSide * kPatchSide, kSlice = kPatchPixels * 128;

// The kernel for h1 and h2 of kN channels.
template <int kN>
struct Widths {
  static constexpr bool kFlat = kN == 48 || kN == 96;  // taps of weight 1 follow each other without a gap
  static constexpr bool kByHand = kN == 32;            // consumers copy weights that stay
  static constexpr int kTeam = kN > 64 ? 2 : 1;        // warpgroups to a tile
  static constexpr int kMaxTeams = kN > 64 ? 1 : kN > 32 ? 2 : 3;
  static constexpr int kThreads = (kTeam * kMaxTeams + 1) * 128;
  static constexpr int kConsumerRegisters = kThreads == 512 ? 152 : 224;
  static constexpr int kSlabs = kN > 64 ? 2 : 1;       // of 64 channels of h1, h2
  static constexpr int kRows = 64 * kTeam;             // outputs of a slab of weight 2
  static constexpr int kSteps = kN / 16;               // of WGMMA, of a tap
  static constexpr int kSlabSteps = kN == 32 ? 2 : 4;  // of a slab of weight 1
  static constexpr int kGroup = kN == 32 ? 3 : 1;      // slabs of weight 1 that are committed at once
  static constexpr int kTapSlabs = (9 * kSteps + kSlabSteps - 1) / kSlabSteps;
};

constexpr int kXFull = 0, kXEmpty = kXFull + 8 * kMaxBuffers * kMaxSlices,
              kTileFull = kXEmpty + 8 * kMaxBuffers * kMaxSlices;
constexpr int kWFull = kTileFull + 8 * kMaxBuffers, kWEmpty = kWFull + 8 * kMaxStages;
constexpr int kBarriersEnd = kWEmpty + 8 * kMaxStages, kUnitsAt = kBarriersEnd;
constexpr int kNowhere = kUnitsAt + 16 * kMaxBuffers, kBias1At = kNowhere + 16;
constexpr int kBias2At = kBias1At + kMaxWidth * 4, kBias3At = kBias2At + kMaxWidth * 4;
static_assert(kUnitsAt % 16 == 0 && kBias1At % 8 == 0);

struct Maps {
  CUtensorMap x, w1, w2, w3;
};
struct Args : CommonArgs {
  const void *bias1, *bias2;  // of h1, h2; bias is y's
  const int32_t* block_map;
  const uint4* words[3];               // the weights, where they stay
  int width, slices;                   // channels of h1 and h2; slabs of 64 channels of x
  int teams, buffers;                  // tiles at once; patches
  int h_at, ring_at;                   // where h1s and weights begin; patches lie before the h1s
  int weights, stages, narrow, pitch;  // slabs of weights of a tile, and how many fit; see stage_at()
  int shared;                          // bytes
  bool resident;
  FastDiv units_per_block, units_per_row, block_rows, block_columns;
};

// Slabs that stay lie one after the other, `narrow` ones of weights 0 and 1, then those of weight 2; in a ring all have
// the same pitch, and narrow is 0.
template <int kN>
__device__ __forceinline__ uint32_t stage_at(const Args& a, uint32_t smem, int stage) {
  return smem + a.ring_at + min(stage, a.narrow) * kN * 128 + max(stage - a.narrow, 0) * a.pitch;
}

__device__ __forceinline__ uint32_t patch_at(const Args& a, uint32_t smem, int buffer) {
  return smem + a.h_at - (a.buffers - buffer) * a.slices * kSlice;
}

// Word `word`, of 16 bytes, of the row of 128 at `row`.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t word) {
  return row + ((word ^ (row >> 7 & 7)) << 4);
}

// ---------------------------------------------------------------- host
// The kernel for a width.
inline int padded(int64_t width) {
  return width <= 32 ? 32 : width == 48 ? 48 : width <= 64 ? 64 : width == 96 ? 96 : kMaxWidth;
}

// Shared memory: two tiles at once or more beside all weights, or else as many as leave room for a ring; and as many
// patches ahead as there is room for then.
template <int kN>
void lay_out(const BottleneckParams& p, Args* a) {
  using W = Widths<kN>;
  a->width = static_cast<int>(p.weight[0].size[0]);
  a->slices = static_cast<int>((p.x.size[1] + 63) / 64);
  const int narrow = a->slices + W::kTapSlabs, wide = (a->slices + W::kTeam - 1) / W::kTeam * W::kSlabs;
  const int pitch = std::max(kN, W::kRows) * 128, all = narrow * kN * 128 + wide * W::kRows * 128;
  const int control = (kBias3At + a->slices * 256 + 127) / 128 * 128, patch = a->slices * kSlice;
  auto room = [&](int teams, int buffers) {
    return kSharedLimit - control - teams * W::kSlabs * kSlice - buffers * patch;
  };
  auto teams_beside = [&](int bytes) {
    int teams = W::kMaxTeams;
    while (teams > 1 && room(teams, teams) < bytes) --teams;
    return teams;
  };
  a->teams = teams_beside(all);
  a->resident = a->teams > 1;
  if (!a->resident) a->teams = teams_beside(kLeastStages * pitch);
  const int least = a->resident ? all : kLeastStages * pitch;
  a->buffers = a->teams;
  while (a->buffers < 2 * a->teams && room(a->teams, a->buffers + 1) >= least) ++a->buffers;
  a->weights = narrow + wide;
  a->h_at = control + a->buffers * patch;
  a->ring_at = a->h_at + a->teams * W::kSlabs * kSlice;
  a->narrow = a->resident ? narrow : 0;
  a->pitch = a->resident ? W::kRows * 128 : pitch;
  a->stages = a->resident ? a->weights : std::min(room(a->teams, a->buffers) / pitch, kMaxStages);
  a->shared = a->ring_at + (a->resident ? all : a->stages * pitch);
}

}  // namespace sbnet::sm90::bottleneck_detail
