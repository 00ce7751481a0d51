// The fused bottleneck block (bottleneck.cu): how a launch is cut, its arguments and shared memory; the producer warps:
// which cells a CTA computes, their input, the weights.
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

// The w of a unit: a bit for each of the 3x3 cells around it, set if that is active; kLast: no tile, nor another
// after it; kOthersGoOn: but weights go by for other teams' tiles.
constexpr int kLast = 1 << 9, kOthersGoOn = 1 << 10;

// How many cells this CTA computes.
__device__ __forceinline__ int tiles_of_cta(const Args& a) {
  const int count = min(max(load_int(a.count), 0), a.capacity),
            total = count * static_cast<int>(a.units_per_block.divisor);
  return (total - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
}

// One warp: units and their patches. Nine lanes look up a tile and the cells around it, three tiles at a time.
__device__ __forceinline__ void produce_patches(const Args& a, const Maps& maps, uint32_t smem, int4* units) {
  const int lane = threadIdx.x & 31, cell = lane % 9;
  uint32_t sub = 0;  // which cell of its block this lane's tile is
  auto find = [&](int first) {
    uint32_t row;
    a.units_per_block.divmod(blockIdx.x + (first + lane / 9) * gridDim.x, &row, &sub);
    return load_row(a, row);
  };
  await_settled(a);
  int4 block = find(0);
  const int tiles = tiles_of_cta(a), count = min(max(load_int(a.count), 0), a.capacity);
  int buffer = 0, phase = 1;
  grid_dependency_wait();
  auto announce = [&](int4 unit) {
    if (lane == 0) {
      units[buffer] = unit;
      mbar_arrive(smem + kTileFull + 8 * buffer);
    }
    if (++buffer == a.buffers) buffer = 0, phase ^= 1;
  };
  for (int first = 0; first < tiles; first += 3) {
    uint32_t sub_y, sub_x;
    a.units_per_row.divmod(sub, &sub_y, &sub_x);
    const int4 mine = unit_of_block(a, block, first + lane / 9 < tiles, sub_y * 8, sub_x * 8);
    int slot = -1;  // of the cell's block; needed when the patch is on its way
    const int y = mine.y + (cell / 3 - 1) * 8, x = mine.z + (cell % 3 - 1) * 8;
    if (lane < 27 && mine.x >= 0 && y >= 0 && x >= 0 && y < a.H && x < a.W) {
      const int i = a.block_rows.quotient(y), j = a.block_columns.quotient(x);
      slot = load_int(a.block_map + (static_cast<int64_t>(mine.x) * a.grid_h + i) * a.grid_w + j);
    }
    uint32_t active = 0;
    for (int t = 0; t < min(tiles - first, 3); ++t) {
      int4 unit = make_int4(__shfl_sync(0xffffffff, mine.x, 9 * t), __shfl_sync(0xffffffff, mine.y, 9 * t),
                            __shfl_sync(0xffffffff, mine.z, 9 * t), 0);
      if (lane == 0) {
        auto load = [&](int c) {
          const uint32_t full = smem + kXFull + 8 * (buffer * kMaxSlices + c);
          mbar_expect(full, kSlice);
          tma_load(patch_at(a, smem, buffer) + c * kSlice, &maps.x, full, c * 64, unit.z - 1, unit.y - 1, unit.x);
        };
        if (first + t < a.buffers) {
          for (int c = 0; c < a.slices; ++c) load(c);
        } else {
          for (int c = 0; c < a.slices; ++c) {
            mbar_wait(smem + kXEmpty + 8 * (buffer * kMaxSlices + c), phase);
            load(c);
          }
        }
      }
      __syncwarp();
      if (t == 0) active = __ballot_sync(0xffffffff, slot >= 0 && slot < count);
      unit.w = active >> 9 * t & (1 << 9) - 1;
      announce(unit);
    }
    block = find(first + 3);
  }
  for (int i = 0; i < a.teams; ++i) {
    if (lane == 0) mbar_wait(smem + kXEmpty + 8 * (buffer * kMaxSlices + a.slices - 1), phase);
    __syncwarp();
    const int begun = tiles % a.teams;  // tiles of the last round
    const bool others = begun && begun + i < a.teams;
    announce(make_int4(0, 0, 0, kLast | (others ? kOthersGoOn : 0)));
  }
}

// All consumers: weights of up to 32 hidden channels that stay. TMA takes long for such short rows.
__device__ __forceinline__ void copy_weights(const Args& a, uint8_t* shared, int threads) {
  const int width = a.width / 8, channels = a.K / 8;  // in words of 16 bytes
  int at = a.ring_at;
  auto copy = [&](int rows, auto word_of) {
#pragma unroll 8
    for (int i = threadIdx.x; i < rows * 8; i += threads) {
      const uint4* from = word_of(i / 8, i % 8);
      *reinterpret_cast<uint4*>(shared + swizzled(at + i / 8 * 128, i % 8)) = from ? *from : make_uint4(0, 0, 0, 0);
    }
    at += rows * 128;
  };
  copy(a.slices * 32, [&](int row, int word) {
    const int k = row % 32, c = row / 32 * 8 + word;
    return k < a.width && c < channels ? a.words[0] + k * channels + c : nullptr;
  });
  copy(9 * 32, [&](int row, int word) {
    const int k = row % 32, tap = row / 32;
    return k < a.width && word < width ? a.words[1] + (k * 9 + tap) * width + word : nullptr;
  });
  copy(a.slices * 64,
       [&](int row, int word) { return row < a.K && word < width ? a.words[2] + row * width + word : nullptr; });
}

// One lane: the slabs of weights in their order, for each round of tiles.
template <int kN>
__device__ __forceinline__ void load_weights(const Args& a, const Maps& maps, uint32_t smem) {
  using W = Widths<kN>;
  const int tiles = tiles_of_cta(a), rounds = a.resident ? min(tiles, 1) : (tiles + a.teams - 1) / a.teams;
  int stage = 0, phase = 1;
  auto next = [&](int bytes, auto load) {
    const uint32_t full = smem + kWFull + 8 * stage;
    mbar_wait(smem + kWEmpty + 8 * stage, phase);
    mbar_expect(full, bytes);
    load(stage_at<kN>(a, smem, stage), full);
    if (++stage == a.stages) stage = 0, phase ^= 1;
  };
  for (int i = 0; i < rounds; ++i) {
    for (int c = 0; c < a.slices; ++c)
      next(kN * 128, [&](uint32_t to, uint32_t full) { tma_load(to, &maps.w1, full, c * 64, 0); });
    for (int s = 0; s < W::kTapSlabs; ++s)
      next(kN * 128, [&](uint32_t to, uint32_t full) {
        if constexpr (W::kFlat)
          tma_load(to, &maps.w2, full, s * 64, 0);
        else
          tma_load(to, &maps.w2, full, s % W::kSlabs * 64, s / W::kSlabs, 0);
      });
    for (int k = 0; k < a.K; k += W::kRows)
      for (int l = 0; l < W::kSlabs; ++l)
        next(W::kRows * 128, [&](uint32_t to, uint32_t full) { tma_load(to, &maps.w3, full, l * 64, k); });
  }
}

}  // namespace sbnet::sm90::bottleneck_detail
