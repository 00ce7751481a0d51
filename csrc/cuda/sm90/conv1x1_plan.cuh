// How a launch of a Hopper 1x1 convolution is cut: its arguments, tiles and shared memory. See conv1x1.cu and
// conv1x1_wide.cu.
#pragma once
#include "cuda/sm90/conv_host.cuh"

namespace sbnet::sm90::one {

constexpr int kThreads = 640;
constexpr int kWarpgroups = 4, kMaxGroups = 2, kMaxStages = 16, kTileSlots = 4, kMaxUnits = 8, kMaxResident = 32;
constexpr int kSlab = 64 * 128;  // bytes of 64 output x 64 input channels of weights

// Shared memory: control, then what the host lays out.
constexpr int kFull = 0, kEmpty = kFull + 8 * kMaxGroups * kMaxStages;
constexpr int kTileFull = kEmpty + 8 * kMaxGroups * kMaxStages, kTileEmpty = kTileFull + 8 * kMaxGroups * kTileSlots;
constexpr int kResidualFull = kTileEmpty + 8 * kMaxGroups * kTileSlots;
constexpr int kWeightFull = kResidualFull + 2 * 8 * kWarpgroups, kBarriersEnd = kWeightFull + 8 * kMaxResident;
constexpr int kUnitsAt = (kBarriersEnd + 15) / 16 * 16;
constexpr int kControl = 4096;
constexpr int kBiasAt = kUnitsAt + kMaxGroups * kTileSlots * kMaxUnits * 16;
static_assert(kBiasAt <= kControl);
// conv1x1_wide.cu
constexpr int kMaxWideChannels = 256, kWideControl = 3072, kWideWarps = 8;
constexpr int kRows = 16 * 128;  // bytes of a warp's 16 pixels x 64 channels: what it stages at a time
static_assert(kBiasAt + kMaxWideChannels * 4 <= kWideControl);

struct Maps {
  CUtensorMap x, w, y, residual;
};

struct Args : CommonArgs {
  int C, slices;
  int wide, groups;         // warpgroups per group, groups per CTA
  int slabs;                // of 64 output channels, of a tile
  int log_cluster;          // CTAs that share streamed weights
  int units, cell, side;    // cells of a tile; bytes of 64 channels of one, its side in pixels
  int stages, stage_bytes;  // of a group's ring
  int weights_at, ring_at;  // staging lies before them, behind the control block
  int buffers;  // of output: a warpgroup's (with a residual two, to fetch the next tile's early); wide: a warp's
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

inline Status weight_map(CUtensorMap* map, const Conv2dParams& p) {
  const cuuint64_t size[2] = {cuuint64_t(p.x.size[1]), cuuint64_t(p.weight.size[0])};
  const cuuint64_t stride[1] = {size[0] * 2};
  const cuuint32_t box[2] = {64, 64};
  return make_map(map, p.x.dtype, "weight", 2, p.weight.data, size, stride, box);
}

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
    a->slabs = a->wide;
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

// conv1x1_wide.cu: C a multiple of 64, K of 128.
inline Plan plan_wide(const Conv2dParams& p, Args* a) {
  const int cell = cell_side(p.active.grid), per_row = p.active.grid.size[1] / cell;
  const int per_block = p.active.grid.size[0] / cell * per_row;
  a->slices = static_cast<int>(p.x.size[1] / 64);
  a->side = cell;
  a->cell = cell * cell * 128;
  a->units_per_block = FastDiv(per_block);
  a->units_per_row = FastDiv(per_row);
  a->slabs = p.weight.size[0] % kMaxWideChannels ? 2 : 4;

  // Two warpgroups, each with tiles of 64 pixels of its own. With resident weights each has its own ring of input too.
  const bool residual = p.residual.data;
  const int weights = a->slabs * kSlab;
  a->resident = a->slices * a->slabs <= (residual ? 8 : 16);  // 4 x 4 and residuals would leave a ring two stages
  a->groups = 2;
  a->units = 64 / (cell * cell);
  a->log_cluster = a->resident ? 0 : 1;
  a->buffers = residual ? a->slabs : 2;
  a->weights_at = kWideControl + kWideWarps * a->buffers * kRows;
  a->ring_at = a->weights_at + (a->resident ? a->slices * weights : 0);
  a->stage_bytes = a->resident ? kSlab : 2 * kSlab + weights;
  const int rings = a->resident ? 2 : 1, most = (kSharedLimit - a->ring_at) / a->stage_bytes / rings;
  a->stages = most < kMaxStages ? most : kMaxStages;

  Plan plan = {};
  plan.tiles = (p.active.capacity * per_block + a->units - 1) / a->units;
  plan.ktiles = static_cast<int>(p.weight.size[0] / (a->slabs * 64));
  a->ktiles = FastDiv(plan.ktiles);
  plan.shared = a->ring_at + rings * a->stages * a->stage_bytes;
  return plan;
}

}  // namespace sbnet::sm90::one
