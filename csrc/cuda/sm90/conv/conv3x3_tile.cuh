// What the parts of the Hopper 3x3 convolution share: tile shapes, shared memory layout, arguments, the tile record.
#pragma once
#include "cuda/sm90/conv/conv3x3_taps.cuh"
#include "cuda/sm90/conv/conv_args.cuh"

namespace sbnet::sm90 {

// A tile is up to 256 output pixels x 64 output channels. One warpgroup computes 64 channels x 128 pixels: 16 groups
// of 8 neighbouring pixels, a fixed distance apart in its input patch, which is all that a WGMMA descriptor can say.
enum class Shape {
  kSquare,  // 16x16 pixels, one shared patch, a warpgroup per 8-pixel column
  kStrip,   // 16x8 pixels per warpgroup, each with its own patch
  kCells,   // two 8x8 cells per warpgroup, possibly of different blocks: their patch rows alternate
};

constexpr int kConsumers = 4;        // warpgroups
constexpr int kThreads = 640;        // + patch producer, weight producer, two warps that zero the fringe
constexpr int kStaging = 128 * 128;  // bytes of a warpgroup's output: 128 pixels x 64 channels

enum class Work {
  kWhole,
  kShared,  // the two CTAs of the cluster compute half of the taps each and finish one warpgroup's half each
  kNarrow,  // so few tiles that halves are shared: the two warpgroups take half of the half's pixels each
};

// What the patch producer tells the other warps about a tile.
template <int kUnits>
struct TileRecord {
  int4 unit[kUnits];    // n, y, x of each square, strip or cell; n < 0: nothing there
  int k0;               // first output channel
  int v0, v1;           // taps to compute, counted slice by slice (9 per 64 input channels); v1 = 0: no more tiles
  uint32_t slice, tap;  // ring positions: patches and taps used by earlier tiles of this CTA
  Work work;
  int side;   // narrow: which half
  int alone;  // shared, and no tile follows
  int guard;  // warpgroups 2 and 3: their staging memory may still hold an earlier tile's incoming sums
};

template <class T_, Shape kShape_, bool kResident_, int kSteps_, int kStride_ = 1, int kFewLog_ = 0>
struct Config {
  using T = T_;
  static constexpr Shape kShape = kShape_;
  static constexpr bool kResident = kResident_;  // all weights (C, K <= 64) stay in shared memory
  static constexpr int kSteps = kSteps_;         // WGMMA steps of 16 channels per slice (fewer if C < 64)
  static constexpr int kStride = kStride_;
  static constexpr int kFewLog = kFewLog_;  // log2 of the CTAs that share a tile of few (conv3x3_few.cuh); 0: none do
  static constexpr bool kSquare = kShape == Shape::kSquare, kCells = kShape == Shape::kCells;
  static constexpr int kGroup = kResident ? 1 : 2;  // warpgroups per tile
  static constexpr bool kTurns = kGroup == 2;       // two groups take turns
  static constexpr int kTap = 64 * 128;
  static constexpr int kGroups = kConsumers / kGroup;  // tiles in flight
  static constexpr int kUnitsPerWarpgroup = kCells ? 2 : 1;
  static constexpr int kUnits = kSquare ? 1 : kGroup * kUnitsPerWarpgroup;  // per tile
  static constexpr int kUnitHeight = kCells ? 8 : 16, kUnitWidth = kSquare ? 16 : 8;
  static constexpr int kHalo = kStride == 1 ? 2 : 1;  // pixels that a patch has beyond its unit's
  static constexpr int kPatchWidth = kUnitWidth + kHalo, kPatchHeight = kUnitHeight + kHalo;
  static constexpr int kRowPitch = (kCells ? 2 : 1) * kPatchWidth;  // pixels of patch from one row to the next
  static constexpr int kGroupStride = kPatchWidth * 128;            // bytes from one group of 8 pixels to the next
  static constexpr int kHalf = kSquare ? 8 * 128 : kPatchHeight * kRowPitch * 128;  // to the second warpgroup's pixels
  static constexpr int kPatch = kSquare ? kPatchHeight * kPatchWidth * 128 : kGroup * kHalf;  // bytes that TMA delivers
  static constexpr int kPatchPitch = kSquare ? (kPatch + 1023) / 1024 * 1024 : kPatch;
  // Stride 2: the patch of a single tap is done with before the next could come.
  static constexpr int kPatchStages = kResident ? (kCells ? 3 : 4) : kStride == 2 ? 3 : 2;
  // A warpgroup that works alone holds its tile's record through its epilogue: the next one needs a record of its own.
  static constexpr int kTileSlots = kResident ? 8 : 4;
  static constexpr int kRest = 1024;  // tile records and barriers
  static constexpr int kWeightRoom = (kSharedLimit - kRest - kConsumers * kStaging - kPatchStages * kPatchPitch) / kTap;
  static constexpr int kWeightStages = kResident ? 9 : kWeightRoom < 10 ? kWeightRoom : 10;

  static constexpr int kWeightsAt = kConsumers * kStaging;
  static constexpr int kPatchesAt = kWeightsAt + kWeightStages * kTap;
  static constexpr int kTilesAt = kPatchesAt + kPatchStages * kPatchPitch;
  static constexpr int kPatchFull =
      kTilesAt + kTileSlots * static_cast<int>(sizeof(TileRecord<kUnits>));  // barriers from here on
  static constexpr int kPatchEmpty = kPatchFull + 8 * kPatchStages;
  static constexpr int kWeightFull = kPatchEmpty + 8 * kPatchStages;
  static constexpr int kWeightEmpty = kWeightFull + 8 * kWeightStages;
  static constexpr int kTileFull = kWeightEmpty + 8 * kWeightStages;
  static constexpr int kTileEmpty = kTileFull + 8 * kTileSlots;
  static constexpr int kResidualFull = kTileEmpty + 8 * kTileSlots;
  static constexpr int kExchangeFull = kResidualFull + 8 * kConsumers;
  static constexpr int kExchangeDone = kExchangeFull + 8;
  using Tile = TileRecord<kUnits>;

  // Taps are counted in the order of computing, slice by slice; patches likewise.
  static __device__ __forceinline__ int first_patch(int tap) {  // a patch begins at `tap`, or one of stride 1 has it
    return kStride == 1 ? tap / 9 : tap / 9 * 4 + (tap % 9 != 0);
  }
  static __device__ __forceinline__ int first_tap(int patch) {
    return kStride == 1 ? patch * 9 : patch / 4 * 9 + (kFirstTaps >> patch % 4 * 4 & 15);
  }
  static __device__ __forceinline__ int kernel_tap(int q) { return kStride == 1 ? q : kTapOrder >> q * 4 & 15; }
  static constexpr int kFewBarriers = kExchangeDone + 8, kShared = kFewBarriers + (kFewLog ? 112 : 0);
  static_assert(kShared <= kSharedLimit && kWeightStages >= 3 && (kSquare || kStride == 1));
};

struct Maps {  // TMA: input patches, weights of a tap, units of output and residual, and pairs of groups of them
  CUtensorMap x[4], w, y, residual, y_pair, residual_pair;
};

struct Args : CommonArgs {
  int C, slices, log_cluster;
  int few_cells, few_groups;  // at most so many cells are few; cells that are computed at once then
  FastDiv ktiles, units_per_block, units_per_row, clusters;
};

}  // namespace sbnet::sm90
