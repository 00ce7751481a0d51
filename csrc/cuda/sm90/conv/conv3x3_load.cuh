// The producer warps of the Hopper 3x3 convolution: which tiles a CTA computes, their patches, weights, the fringe.
#pragma once
#include "cuda/sm90/conv/conv3x3_tile.cuh"

namespace sbnet::sm90 {

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
