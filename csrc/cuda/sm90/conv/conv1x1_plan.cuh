// How a launch of a Hopper 1x1 convolution is cut: its arguments, tiles and shared memory. See conv1x1.cu,
// conv1x1_wide.cu and conv1x1_split.cu.
#pragma once
#include "core/masked/conv_patches.h"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90::conv1x1_detail {

constexpr int kThreads = 640;
constexpr int kWarpgroups = 4, kMaxWarps = 4 * kWarpgroups, kMaxGroups = 2, kMaxStages = 16, kTileSlots = 4,
              kMaxUnits = 8, kMaxResident = 32;
constexpr int kSlab = 64 * 128;  // bytes of 64 output x 64 input channels of weights

// Shared memory: control, then what the host lays out.
constexpr int kFull = 0, kEmpty = kFull + 8 * kMaxGroups * kMaxStages;
constexpr int kTileFull = kEmpty + 8 * kMaxGroups * kMaxStages, kTileEmpty = kTileFull + 8 * kMaxGroups * kTileSlots;
constexpr int kResidualFull = kTileEmpty + 8 * kMaxGroups * kTileSlots;
constexpr int kWeightFull = kResidualFull + 8 * kMaxWarps, kBarriersEnd = kWeightFull + 8 * kMaxResident;
constexpr int kUnitsAt = (kBarriersEnd + 15) / 16 * 16;
constexpr int kControl = 4096;
constexpr int kBiasAt = kUnitsAt + kMaxGroups * kTileSlots * kMaxUnits * 16;
static_assert(kBiasAt <= kControl);
// conv1x1_wide.cu
constexpr int kWideControl = 3072;
constexpr int kRows = 16 * 128;  // bytes of a warp's 16 pixels x 64 channels: what it stages at a time
static_assert(kBiasAt + 256 * 4 <= kWideControl);

// Boxes of a cell: of the plane, or, where every block is active, of the pixels in a row.
struct PlaneMaps {
  CUtensorMap x, y, residual;
};
struct Maps {
  CUtensorMap w, row;  // row: conv1x1_split.cuh
  PlaneMaps of[2];     // [flat]
};

struct Args : CommonArgs {
  int C, slices;
  FastDiv row_slices;   // slices of a row of a patch, or of a tap
  bool patches;         // core/masked/conv_patches.h
  bool taps;            // a slice is 64 input channels of a tap
  FastDiv tap_columns;  // of the kernel
  int dilation[2], padding[2];
  int flat_count, pixels;               // of a list of all blocks, -1 if it is not to be taken as flat; N * H * W
  int wide, groups;                     // warpgroups per group, groups per CTA
  int slabs;                            // of 64 output channels, of a tile
  int log_cluster;                      // CTAs that share streamed weights
  int units, cell, side;                // cells of a tile; bytes of 64 channels of one, its side in pixels
  int stages, stage_bytes;              // of a group's ring
  int staging_at, weights_at, ring_at;  // in this order, behind the control block
  int buffers;  // of output: a warpgroup's (with a residual two, to fetch the next tile's early); wide: a warp's
  bool resident;
  bool pairs;  // a warp stores 128 channels at a time
  FastDiv ktiles, units_per_block, units_per_row;
  FastDiv ctas;  // of the launch, if they share jobs
};

// A list that counts as many rows as there are blocks is taken as one row of pixels, cut without regard to blocks,
// where cells are small or would reach over the edge of the plane (or `always`) and all pixels lie in a row.
inline bool in_a_row(const TensorView& t) {
  const Plane p = plane_of(t);
  return p.y == p.x * t.size[3] && p.n == p.y * t.size[2];
}
inline void allow_flat(const Conv2dParams& p, Args* a, bool always = false) {
  const double pixels = static_cast<double>(a->N) * a->H * a->W;
  const bool pays = always || a->side < 8 || a->H % a->side || a->W % a->side;
  // A phase of a transposed convolution may write another plane than the one it reads.
  const bool same = p.x.size[2] == p.y.size[2] && p.x.size[3] == p.y.size[3];
  const bool rows = same && in_a_row(p.x) && in_a_row(p.y) && (!p.residual.data || in_a_row(p.residual));
  const double blocks = static_cast<double>(a->N) * a->grid_h * a->grid_w;
  a->flat_count = -1;
  if (!pays || p.stride[0] != 1 || !is_pixelwise(p) || !rows || pixels >= INT32_MAX / 2 || blocks > a->capacity) return;
  a->flat_count = static_cast<int>(blocks);
  a->pixels = static_cast<int>(pixels);
}
inline Status flat_map(CUtensorMap* m, const char* name, const TensorView& t, int box) {
  const cuuint64_t step = cuuint64_t(plane_of(t).x) * 2, pixels = cuuint64_t(t.size[0]) * t.size[2] * t.size[3];
  const cuuint64_t size[4] = {cuuint64_t(t.size[1]), pixels, 1, 1}, stride[3] = {step, step * pixels, step * pixels};
  const cuuint32_t boxes[4] = {64, cuuint32_t(box), 1, 1};
  return make_map(m, t.dtype, name, 4, t.data, size, stride, boxes);
}
// One of PlaneMaps: boxes of 64 channels of `rows` rows of a cell, or of `row` pixels of a flat plane.
inline Status box_maps(Maps* maps, CUtensorMap PlaneMaps::* which, const char* name, const TensorView& t, const Args& a,
                       int rows, int row, int step = 1) {
  SBNET_TRY(plane_map(&(maps->of[0].*which), name, t, a.side, rows, step));
  return a.flat_count < 0 ? ok_status() : flat_map(&(maps->of[1].*which), name, t, row);
}
// Whole cells of the input; of patches one of their rows.
inline Status input_maps(Maps* maps, const Conv2dParams& p, const Args& a) {
  if (a.patches) {
    const Plane x = plane_of(p.x);
    const int64_t rows = p.weight.size[2];
    const cuuint64_t size[5] = {cuuint64_t(p.x.size[1] / rows), cuuint64_t(p.x.size[3]), cuuint64_t(p.x.size[2]),
                                cuuint64_t(rows), cuuint64_t(p.x.size[0])};
    const cuuint64_t stride[4] = {cuuint64_t(x.x) * 2, cuuint64_t(x.y) * 2, cuuint64_t(x.y / rows) * 2,
                                  cuuint64_t(x.n) * 2};
    const cuuint32_t box[5] = {64, cuuint32_t(a.side), cuuint32_t(a.side), 1, 1};
    return make_map(&maps->of[0].x, p.x.dtype, "x", 5, x.data, size, stride, box);
  }
  return box_maps(maps, &PlaneMaps::x, "x", p.x, a, a.side, a.side * a.side, p.stride[0]);
}
// Of 128 channels: a pixel's lie side by side, in two rows of shared memory. Where memory is what takes time, boxes of
// 64 channels, 128 bytes of a pixel, take 5 % longer.
inline Status pair_maps(Maps* maps, CUtensorMap PlaneMaps::* which, const char* name, const TensorView& t,
                        const Args& a, int rows, int row) {
  const Plane p = plane_of(t);
  auto encode = [&](CUtensorMap* m, int64_t w, int64_t h, int64_t n, int box_x, int box_y) {
    const cuuint64_t size[5] = {64, cuuint64_t(t.size[1] / 64), cuuint64_t(w), cuuint64_t(h), cuuint64_t(n)};
    const cuuint64_t stride[4] = {128, cuuint64_t(p.x) * 2, cuuint64_t(p.y) * 2, cuuint64_t(p.n) * 2};
    const cuuint32_t box[5] = {64, 2, cuuint32_t(box_x), cuuint32_t(box_y), 1};
    return make_map(m, t.dtype, name, 5, t.data, size, stride, box);
  };
  SBNET_TRY(encode(&(maps->of[0].*which), t.size[3], t.size[2], t.size[0], a.side, rows));
  return a.flat_count < 0 ? ok_status() : encode(&(maps->of[1].*which), a.pixels, 1, 1, row, 1);
}

// Cells, slices of channels. Returns how many cells a block has.
inline int cut_cells(const Conv2dParams& p, Args* a) {
  const int cell = conv1x1_cell(p.active.grid), per_row = p.active.grid.size[1] / cell;
  const int per_block = p.active.grid.size[0] / cell * per_row;
  a->C = static_cast<int>(p.x.size[1]);
  const int64_t of_channels = (a->C + 63) / 64, taps = p.weight.size[2] * p.weight.size[3];
  a->taps = p.weight.size[1] == a->C && taps > 1;
  a->patches = !a->taps && taps > 1;
  a->slices = static_cast<int>(a->taps ? of_channels * taps : of_channels);
  a->row_slices = FastDiv(a->patches ? of_channels / p.weight.size[2] : of_channels);
  a->tap_columns = FastDiv(p.weight.size[3]);
  for (int d = 0; d < 2; ++d)
    a->dilation[d] = static_cast<int>(p.dilation[d]), a->padding[d] = static_cast<int>(p.padding[d]);
  a->side = cell;
  a->cell = cell * cell * 128;
  a->units_per_block = FastDiv(per_block);
  a->units_per_row = FastDiv(per_row);
  allow_flat(p, a);
  return per_block;
}

// How a launch is cut: tile sizes and shared memory.
struct Plan {
  int64_t tiles;  // of pixels, if every slot of the list is active
  int pixels, ktiles, shared;
};

// Numbers that an output sums: input channels of all taps.
inline int64_t reduction_of(const Conv2dParams& p) { return p.weight.size[1] * p.weight.size[2] * p.weight.size[3]; }

inline Status weight_map(CUtensorMap* map, const Conv2dParams& p, int rows = 64) {
  const cuuint64_t size[2] = {cuuint64_t(reduction_of(p)), cuuint64_t(p.weight.size[0])};
  const cuuint64_t stride[1] = {size[0] * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(rows)};
  return make_map(map, p.x.dtype, "weight", 2, p.weight.data, size, stride, box);
}

inline Plan plan_launch(const Conv2dParams& p, const DeviceInfo& device, Args* a) {
  const int slabs = static_cast<int>((p.weight.size[0] + 63) / 64);
  const int per_block = cut_cells(p, a), cell = a->side;

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
    a->staging_at = kControl;
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

// conv1x1_wide.cu, which says what is chosen: C a multiple of 64, K of 128.
inline Plan plan_wide(const Conv2dParams& p, Args* a) {
  const int per_block = cut_cells(p, a), cell = a->side;
  const int64_t K = p.weight.size[0];
  const bool residual = p.residual.data, gated = p.activation == Activation::kSilu || p.activation == Activation::kGelu;
  a->slabs = K % 256 ? 2 : 4;
  a->resident = a->slices * a->slabs <= (residual ? 8 : 16);  // 4 x 4 and residuals would leave a ring two stages
  a->wide = a->slabs == 4 && (a->resident || residual || gated) ? 2 : 1;
  a->pairs = a->wide == 2 && a->slices <= 2;
  if (a->pairs && !residual && K % 512 == 0) a->wide = 4, a->slabs = 8;
  a->groups = a->wide == 4 ? 1 : 2;
  a->units = 64 / (cell * cell);
  a->log_cluster = a->resident ? 0 : 1;

  const int weights = a->slabs * kSlab;
  a->buffers = residual ? a->slabs / a->wide : a->wide == 2 && !a->pairs ? 1 : 2;
  a->staging_at = kWideControl + (a->wide == 4 ? 1024 : 0);  // twice as many biases
  a->weights_at = a->staging_at + 4 * a->groups * a->wide * a->buffers * kRows;
  a->ring_at = a->weights_at + (a->resident ? a->slices * weights : 0);
  a->stage_bytes = a->resident ? kSlab : 2 * kSlab + weights;
  const int rings = a->resident ? a->groups : 1, most = (kSharedLimit - a->ring_at) / a->stage_bytes / rings;
  a->stages = most < kMaxStages ? most : kMaxStages;

  Plan plan = {};
  plan.tiles = (p.active.capacity * per_block + a->units - 1) / a->units;
  plan.ktiles = static_cast<int>(p.weight.size[0] / (a->slabs * 64));
  a->ktiles = FastDiv(plan.ktiles);
  plan.shared = a->ring_at + rings * a->stages * a->stage_bytes;
  return plan;
}

}  // namespace sbnet::sm90::conv1x1_detail
