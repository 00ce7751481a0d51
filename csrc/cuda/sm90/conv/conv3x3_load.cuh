// The Hopper 3x3 convolution: what its parts share (tile shapes, shared memory layout, arguments, the tile record), and
// the producer warps.
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

// Warp 16: walks this CTA's tiles, tells the other warps about each and loads its input patches.
//
// Cluster c of the launch computes tiles c, c + clusters, ... If their number is odd, its two CTAs share the first (the
// sums are exchanged under the cover of the whole tiles that follow); then they take whole tiles in turn. When all have
// an even number and at most half of the clusters would have one more, twice as many share halves instead: clusters 2t
// and 2t + 1 those of tile t, and cluster t takes the one more in its place. Nothing but the count decides.
template <class C>
__device__ void produce_patches(const Args& a, const CUtensorMap* maps_x, uint32_t smem, typename C::Tile* tiles) {
  constexpr unsigned kAll = 0xffffffff;
  const int lane = threadIdx.x & 31, ctas = 1 << a.log_cluster, rank = blockIdx.x & (ctas - 1);
  const int cluster = blockIdx.x >> a.log_cluster, clusters = gridDim.x >> a.log_cluster, taps = a.slices * 9;

  // Each lane finds one square, strip or cell of the cluster's next tiles. The rows of the first ones are asked for
  // together with the count, which they turn out to need or not; all that does not depend on them is computed before
  // the previous kernel is done.
  constexpr bool kAliases = !C::kTurns && C::kPatchStages < C::kGroups;
  constexpr int kBatch = 32 / C::kUnits - 1;  // tiles per look-up; the last lanes look up the one to take a half of
  const int u = lane % C::kUnits;
  int first = 0, loaded = 0, count = 0, k0, sub_y, sub_x, half_taps = taps / 2;
  uint32_t row;
  int4 unit;
  auto aim = [&](int m) {
    uint32_t t = lane / C::kUnits == kBatch ? cluster / 2 : cluster + (m + lane / C::kUnits) * clusters;
    uint32_t ktile, sub, y, x;
    a.ktiles.divmod(t, &t, &ktile);
    a.units_per_block.divmod(t * C::kUnits + u, &row, &sub);
    a.units_per_row.divmod(sub, &y, &x);
    k0 = ktile * 64, sub_y = y * C::kUnitHeight, sub_x = x * C::kUnitWidth;
    first = m;
  };
  auto locate = [&] {
    const int4 block = load_row(a, row);
    count = min(max(loaded, 0), a.capacity);
    unit = unit_of_block(a, block, row < static_cast<uint32_t>(count), sub_y, sub_x);
  };
  aim(0);
  pin(k0, sub_y, sub_x, half_taps);
  await_settled(a);
  loaded = load_int(a.count);
  locate();

  const int units = count * static_cast<int>(a.units_per_block.divisor);
  const int total = (units + C::kUnits - 1) / C::kUnits * static_cast<int>(a.ktiles.divisor);
  const int each = a.clusters.quotient(total), more = total - each * clusters;
  const bool halves = C::kTurns && !C::kResident && ctas == 2 && each % 2 == 0 && more * 2 <= clusters;
  const int begin = halves && cluster < more, end = begin + each + (!halves && cluster < more);
  const int shared = halves ? cluster < more * 2 : (end - begin) & (ctas - 1);
  int made = 0, tap = 0, next = begin + (halves ? 0 : shared) + rank;
  uint32_t slice = 0;
  bool exchanged = false;
  for (bool share = shared; share || next < end; share = false) {
    const bool narrow = share && halves;
    const int m = share ? 0 : next;
    if (!share) next += ctas;
    const int v0 = share && rank ? half_taps : 0, v1 = share && !rank ? half_taps : taps;
    if (m >= first + kBatch) {
      aim(m);
      locate();
    }
    const bool mine = lane / C::kUnits == (narrow ? kBatch : m - first);
    if (!__any_sync(kAll, mine && unit.x >= 0)) continue;
    const uint32_t slot = static_cast<uint32_t>(made) % C::kTileSlots, slice0 = slice;
    typename C::Tile& tile = tiles[slot];
    // The writing lane arrives on the barrier itself, so no warp sync is needed.
    auto announce = [&] {
      if (!mine) return;
      mbar_wait(smem + C::kTileEmpty + 8 * slot, ((made / C::kTileSlots) & 1) ^ 1);
      tile.unit[u] = unit;
      if (u == 0) {
        tile.k0 = k0, tile.v0 = v0, tile.v1 = v1, tile.slice = slice0, tile.tap = tap;
        tile.work = !share ? Work::kWhole : narrow ? Work::kNarrow : Work::kShared;
        tile.side = cluster & 1;
        tile.alone = share && !narrow && end == 1;
        tile.guard = exchanged && made == 1;
        // Groups that do not take turns must not ask for a patch before its stage's last one has landed and been read:
        // with fewer stages than groups the parities of the barrier would alias.
        if (kAliases)
          mbar_wait(smem + C::kPatchEmpty + 8 * (slice0 % C::kPatchStages), (slice0 / C::kPatchStages & 1) ^ 1);
      }
      mbar_arrive(smem + C::kTileFull + 8 * slot);
    };
    // The launch's first patch sets out before its tile is announced: the other warps wait for it longest.
    const bool late = !C::kCells && !kAliases && made == 0;
    if (!late) announce();
    if (made == 0) grid_dependency_wait();
    for (int patch = C::first_patch(v0); C::first_tap(patch) < v1; ++patch, ++slice) {
      const int c = C::kStride == 1 ? patch : patch / 4;
      const CUtensorMap* map_x = maps_x + (C::kStride == 1 ? 0 : patch % 4);
      const int above = C::kStride == 1 ? 1 : patch % 4 < 2, left = C::kStride == 1 ? 1 : patch % 2 == 0;
      const uint32_t stage = slice % C::kPatchStages, phase = slice / C::kPatchStages & 1;
      const uint32_t full = smem + C::kPatchFull + 8 * stage, to = smem + C::kPatchesAt + stage * C::kPatchPitch;
      if (lane == 0) {
        mbar_wait(smem + C::kPatchEmpty + 8 * stage, phase ^ 1);
        mbar_expect(full, C::kPatch);
      }
      __syncwarp();
      if constexpr (C::kCells) {  // TMA cannot leave gaps between rows: a box per row
        constexpr int kRows = 2 * C::kPatchHeight;
        for (int r = lane; r < C::kGroup * kRows; r += 32) {
          const int4 at = tile.unit[r / kRows * 2 + r % 2];
          tma_load(to + r * C::kPatchWidth * 128, map_x, full, c * 64, at.z - left, at.y + r % kRows / 2 - above, at.x);
        }
      } else if (mine) {
        tma_load(to + u * C::kHalf, map_x, full, c * 64, unit.z - left, unit.y - above, unit.x);
      }
      if (late && slice == 0) announce();
    }
    tap += v1 - v0;
    exchanged = exchanged || share;
    ++made;
  }
  for (int g = 0; g < C::kGroups; ++g, ++made) {
    if (lane < C::kUnits) {
      const int slot = made % C::kTileSlots;
      mbar_wait(smem + C::kTileEmpty + 8 * slot, ((made / C::kTileSlots) & 1) ^ 1);
      if (lane == 0) tiles[slot].v1 = 0;
      mbar_arrive(smem + C::kTileFull + 8 * slot);
    }
  }
}

// Warp 17, one lane: the weights of one tap after the other; with resident weights all nine, once.
template <class C>
__device__ void produce_weights(const Args& a, const CUtensorMap* map_w, uint32_t smem, const typename C::Tile* tiles) {
  await_settled(a);
  if constexpr (C::kResident) {
    if (a.weight) return;
    for (int q = 0; q < 9; ++q) {
      mbar_expect(smem + C::kWeightFull + 8 * q, C::kTap);
      tma_load(smem + C::kWeightsAt + q * C::kTap, map_w, smem + C::kWeightFull + 8 * q, 0, C::kernel_tap(q), 0);
    }
    for (int q = 0; q < 9; ++q) mbar_wait(smem + C::kWeightFull + 8 * q, 0);  // never exit with loads in flight
  } else {
    int stage = 0, phase = 1;
    for (int i = 0;; ++i) {
      const int slot = i % C::kTileSlots;
      mbar_wait(smem + C::kTileFull + 8 * slot, (i / C::kTileSlots) & 1);
      const int v0 = tiles[slot].v0, v1 = tiles[slot].v1, k0 = tiles[slot].k0;
      if (v1 == 0) break;
      mbar_arrive(smem + C::kTileEmpty + 8 * slot);
      for (int v = v0; v < v1; ++v) {
        const uint32_t full = smem + C::kWeightFull + 8 * stage;
        mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);
        mbar_expect(full, C::kTap);
        tma_load(smem + C::kWeightsAt + stage * C::kTap, map_w, full, v / 9 * 64, C::kernel_tap(v % 9), k0);
        if (++stage == C::kWeightStages) stage = 0, phase ^= 1;
      }
    }
  }
}

}  // namespace sbnet::sm90
