// How a launch of the Hopper 1x1 convolution is cut: its arguments, tiles and shared memory. See conv1x1.cu.
#pragma once
#include "cuda/sm90/conv_host.cuh"

namespace sbnet::sm90::one {

constexpr int kThreads = 640;
constexpr int kWarpgroups = 4, kMaxGroups = 2, kMaxStages = 16, kTileSlots = 4, kMaxUnits = 8, kMaxResident = 32;
constexpr int kSlab = 64 * 128;  // bytes of 64 output x 64 input channels of weights
constexpr int kSharedLimit = 227 * 1024;

// Shared memory: control, then what the host lays out.
constexpr int kFull = 0, kEmpty = kFull + 8 * kMaxGroups * kMaxStages;
constexpr int kTileFull = kEmpty + 8 * kMaxGroups * kMaxStages, kTileEmpty = kTileFull + 8 * kMaxGroups * kTileSlots;
constexpr int kResidualFull = kTileEmpty + 8 * kMaxGroups * kTileSlots;
constexpr int kWeightFull = kResidualFull + 2 * 8 * kWarpgroups, kBarriersEnd = kWeightFull + 8 * kMaxResident;
constexpr int kUnitsAt = (kBarriersEnd + 15) / 16 * 16;
constexpr int kControl = 4096;
static_assert(kUnitsAt + kMaxGroups * kTileSlots * kMaxUnits * 16 <= kControl);

struct Maps {
  CUtensorMap x, w, y, residual;
};

struct Args : CommonArgs {
  int C, slices;
  int wide, groups;         // warpgroups per group, groups per CTA
  int units, cell, side;    // cells of a tile; bytes of 64 channels of one, its side in pixels
  int stages, stage_bytes;  // of a group's ring
  int weights_at, ring_at;  // staging lies at kControl
  int buffers;              // of a warpgroup's output: with a residual two, to fetch the next tile's early
  bool resident;
  FastDiv ktiles, units_per_block, units_per_row;
};

// ---------------------------------------------------------------- host
inline int cell_side(const BlockGrid& grid) {
  const int sides = grid.size[0] | grid.size[1];
  return sides % 8 == 0 ? 8 : sides % 4 == 0 ? 4 : 0;
}

// How a launch is cut: tile sizes and shared memory.
struct Plan {
  int64_t tiles;  // of pixels, if every slot of the list is active
  int pixels, ktiles, shared;
};

inline Plan plan_launch(const Conv2dParams& p, const DeviceInfo& device, Args* a) {
  const int slabs = static_cast<int>((p.weight.size[0] + 63) / 64), cell = cell_side(p.active.grid);
  const int per_row = p.active.grid.size[1] / cell, per_block = p.active.grid.size[0] / cell * per_row;
  a->slices = static_cast<int>((p.x.size[1] + 63) / 64);
  a->side = cell;
  a->cell = cell * cell * 128;
  a->units_per_block = FastDiv(per_block);
  a->units_per_row = FastDiv(per_row);

  // Wide tiles read the input less often, narrow ones spread a short list over the device. How long the list is only
  // the device knows: an eighth of what there is room for is the guess. Tiles of 64 pixels leave room for a deep ring;
  // in short lists with residuals two groups hide each other's latency better than a wide one.
  const bool residual = p.residual.data;
  Plan plan = {};
  auto count_tiles = [&] {
    a->units = plan.pixels / (cell * cell);
    plan.tiles = (p.active.capacity * per_block + a->units - 1) / a->units;
    plan.ktiles = (slabs + a->wide - 1) / a->wide;
    a->ktiles = FastDiv(plan.ktiles);
    return plan.tiles * plan.ktiles / 8;
  };
  auto widest = [&](int most) {
    plan.ktiles = (slabs + most - 1) / most;
    a->wide = (slabs + plan.ktiles - 1) / plan.ktiles;
    plan.pixels = a->wide == 1 && !residual ? 128 : 64;
    return count_tiles();
  };
  if (widest(kWarpgroups) < device.sm_count * 4 && residual) widest(2);
  while (count_tiles() < device.sm_count / 2 && a->wide > 1) a->wide = (a->wide + 1) / 2;
  if (count_tiles() < device.sm_count / 2) plan.pixels = 64;

  a->buffers = residual ? 2 : 1;
  auto lay_out = [&](int groups, bool resident) {
    count_tiles();
    const int slice = plan.pixels * 128, weights = a->wide * kSlab;
    a->groups = groups;
    a->resident = resident;
    a->weights_at = kControl + groups * a->wide * slice * a->buffers;
    a->ring_at = a->weights_at + (resident ? a->slices * weights : 0);
    a->stage_bytes = slice + (resident ? 0 : weights);
    a->stages = (kSharedLimit - a->ring_at) / a->stage_bytes / groups;
    if (a->stages > kMaxStages) a->stages = kMaxStages;
    return a->stages * slice >= 32 * 1024;
  };
  // Two groups if they fit beside resident weights, or one. Otherwise weights come with the input, which larger tiles
  // make worth it; narrower ones have more stages, but would read the input once more.
  const bool resident = a->slices <= kMaxResident && ((a->wide <= 2 && lay_out(2, true)) || lay_out(1, true));
  if (!resident) {
    if (a->wide > 2 && slabs <= kWarpgroups) a->wide = 2;
    if (count_tiles() >= device.sm_count / 2) plan.pixels = 128;
    lay_out(1, false);
    if (a->stages < 3) {  // two buffers of large tiles leave too little
      plan.pixels = 64;
      lay_out(1, false);
    }
  }
  plan.shared = a->ring_at + a->groups * a->stages * a->stage_bytes;
  return plan;
}

}  // namespace sbnet::sm90::one
