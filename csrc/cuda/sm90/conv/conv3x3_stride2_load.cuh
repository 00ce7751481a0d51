// The Hopper 3x3 convolution of stride 2: shared memory, which tiles a CTA computes, the producer warps.
#pragma once
#include "cuda/sm90/conv/conv3x3_taps.cuh"
#include "cuda/sm90/conv/conv_args.cuh"

namespace sbnet::sm90::conv3x3_stride2_detail {

constexpr int kThreads = 384, kWarpgroups = 2;
constexpr int kStripWidth = 8, kPatchWidth = kStripWidth + 1;
constexpr int kSlab = 64 * 128;  // bytes: 64 x 64 weights
constexpr int kPart = 64 * 128;  // of a tile's output: 64 pixels x 64 channels

template <class T_, int kHeight_, int kSlabs_>
struct Config {
  using T = T_;
  static constexpr int kHeight = kHeight_;  // of a tile, in pixels: 8 or 16
  static constexpr int kSlabs = kSlabs_;    // of 64 output channels of a tile: 1 or 2
  static constexpr int kParts = kHeight / 8 * kSlabs;
  static constexpr int kTap = kSlabs * kSlab, kPatch = (kHeight + 1) * kPatchWidth * 128;  // bytes, of 64 channels
  // Shared memory, to its last byte: the deeper the ring of weights, the further one warpgroup gets ahead while the
  // other is in its epilogue.
  static constexpr int kWeightStages = kHeight == 16 ? (kSlabs == 2 ? 5 : 9) : (kSlabs == 2 ? 7 : 11);
  static constexpr int kPatchStages = kHeight == 16 ? 3 : kSlabs == 2 ? 4 : 5;
  // Staging has room for two parts of each warpgroup's output. Barriers of patches, tiles and residuals: one set after
  // the other for the two warpgroups.
  static constexpr int kStagingAt = 0;
  static constexpr int kWeightsAt = kStagingAt + kWarpgroups * 2 * kPart;
  static constexpr int kPatchesAt = kWeightsAt + kWeightStages * kTap;
  static constexpr int kUnitsAt = kPatchesAt + kWarpgroups * kPatchStages * kPatch;  // n, y, x of a tile; n < 0: none
  static constexpr int kWeightFull = kUnitsAt + kWarpgroups * 16;
  static constexpr int kWeightEmpty = kWeightFull + 8 * kWeightStages;
  static constexpr int kPatchFull = kWeightEmpty + 8 * kWeightStages;
  static constexpr int kPatchEmpty = kPatchFull + 8 * kWarpgroups * kPatchStages;
  static constexpr int kTileFull = kPatchEmpty + 8 * kWarpgroups * kPatchStages;
  static constexpr int kTileEmpty = kTileFull + 8 * kWarpgroups;
  static constexpr int kResidualFull = kTileEmpty + 8 * kWarpgroups;
  static constexpr int kShared = kResidualFull + 8 * kWarpgroups;
  static_assert(kShared <= kSharedLimit);
};

struct Maps {
  CUtensorMap x[4], w, y, residual;  // x: by parity of row and column, odd ones first
};
struct Args : CommonArgs {
  int slices, log_cluster;  // slices: of 64 input channels
  FastDiv ktiles, units_per_block, units_per_row;
};

// Which tiles a CTA computes: output channels ktile * kSlabs * 64, and of the strips of the list strip(m), m = 0, 1,
// ..., alternately by the first and the second warpgroup. Tile m is under way in half rounds m and m + 1.
struct Schedule {
  int ktile, column, columns, ctas, rank;
  __device__ __forceinline__ explicit Schedule(const Args& a) {
    const int cluster = blockIdx.x >> a.log_cluster;
    column = a.ktiles.quotient(cluster);
    ktile = cluster - column * a.ktiles.divisor;
    columns = a.ktiles.quotient(gridDim.x >> a.log_cluster);
    ctas = 1 << a.log_cluster, rank = blockIdx.x & (ctas - 1);
  }
  __device__ __forceinline__ int strip(int m) const { return (m * columns + column) * ctas + rank; }
  // The CTAs of a cluster have as many tiles, the last one perhaps of nothing.
  __device__ __forceinline__ int tiles(const Args& a, int count) const {
    const int rest = count * static_cast<int>(a.units_per_block.divisor) - column * ctas, step = columns * ctas;
    return rest > 0 ? (rest + step - 1) / step : 0;
  }
};
__device__ __forceinline__ int count_of(const Args& a) { return min(max(load_int(a.count), 0), a.capacity); }

// A round is 9 taps of 4 patches for each 64 input channels, its first half 2 of these patches.
constexpr int kMiddleTap = kFirstTaps >> 8 & 15;
struct Round {
  int patches, taps, half;
  __device__ __forceinline__ explicit Round(const Args& a) {
    patches = a.slices * 4, taps = a.slices * 9;
    half = a.slices / 2 * 9 + (a.slices & 1) * kMiddleTap;
  }
};

// Warp 8 or 9: finds the tiles of its warpgroup, a lane each, and loads their patches.
template <class C>
__device__ __forceinline__ void produce_patches(const Args& a, const Maps& maps, uint32_t smem, int4* units, int wg) {
  const Schedule schedule(a);
  const Round round(a);
  const int lane = threadIdx.x & 31;
  uint32_t row, sub, sub_y, sub_x;
  auto aim = [&](int first) {
    a.units_per_block.divmod(schedule.strip((first + lane) * kWarpgroups + wg), &row, &sub);
    a.units_per_row.divmod(sub, &sub_y, &sub_x);
  };
  aim(0);
  await_settled(a);
  int4 block = load_row(a, row);
  const int count = count_of(a), tiles = (schedule.tiles(a, count) + 1 - wg) / kWarpgroups;
  int4 unit;
  int stage = 0, phase = 1;
  grid_dependency_wait();
  for (int i = 0; i < tiles; ++i) {
    if (i % 32 == 0) {
      if (i > 0) {
        aim(i);
        block = load_row(a, row);
      }
      unit = unit_of_block(a, block, row < static_cast<uint32_t>(count), sub_y * C::kHeight, sub_x * kStripWidth);
    }
    const int n = __shfl_sync(0xffffffff, unit.x, i % 32), y = __shfl_sync(0xffffffff, unit.y, i % 32),
              x = __shfl_sync(0xffffffff, unit.z, i % 32);
    if (lane != 0) continue;
    mbar_wait(smem + C::kTileEmpty + 8 * wg, (i & 1) ^ 1);
    units[wg] = make_int4(n, y, x, 0);
    mbar_arrive(smem + C::kTileFull + 8 * wg);
    if (n < 0) continue;
    int patch = wg ? round.patches / 2 : 0;
    for (int p = 0; p < round.patches; ++p) {
      const int at = wg * C::kPatchStages + stage, view = patch & 3;
      const uint32_t full = smem + C::kPatchFull + 8 * at;
      mbar_wait(smem + C::kPatchEmpty + 8 * at, phase);
      mbar_expect(full, (kPatchWidth - view % 2) * (C::kHeight + 1 - view / 2) * 128);
      tma_load(smem + C::kPatchesAt + at * C::kPatch, &maps.x[view], full, patch / 4 * 64, x - (view % 2 == 0),
               y - (view < 2), n);
      if (++stage == C::kPatchStages) stage = 0, phase ^= 1;
      if (++patch == round.patches) patch = 0;
    }
  }
}

// Warp 10, one lane: each CTA of the cluster loads half of a tap for both.
template <class C>
__device__ __forceinline__ void produce_weights(const Args& a, const CUtensorMap* map, uint32_t smem) {
  const Schedule schedule(a);
  const Round round(a);
  await_settled(a);
  const int tiles = schedule.tiles(a, count_of(a)), halves = tiles ? tiles + 1 : 0;
  const int total = halves / 2 * round.taps + (halves & 1) * round.half, k0 = schedule.ktile * C::kSlabs * 64;
  int stage = 0, phase = 1, v = 0;
  for (int t = 0; t < total; ++t) {
    const uint32_t full = smem + C::kWeightFull + 8 * stage, to = smem + C::kWeightsAt + stage * C::kTap;
    const int slice = v / 9, tap = kTapOrder >> (v - slice * 9) * 4 & 15;
    mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);
    mbar_expect(full, C::kTap);
    for (int s = schedule.rank; s < 2; s += schedule.ctas)
      tma_multicast(to + s * C::kTap / 2, map, full, slice * 64, tap, k0 + s * C::kSlabs * 32,
                    (1 << schedule.ctas) - 1);
    if (++stage == C::kWeightStages) stage = 0, phase ^= 1;
    if (++v == round.taps) v = 0;
  }
  // Never exit while another CTA of the cluster may still report here what it has read.
  for (int s = 0; s < C::kWeightStages; ++s) {
    mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);
    if (++stage == C::kWeightStages) stage = 0, phase ^= 1;
  }
}

}  // namespace sbnet::sm90::conv3x3_stride2_detail
