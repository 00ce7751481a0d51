// The producer warps of the Hopper 3x3 convolution: which tiles a CTA computes, their patches, weights, the fringe.
#pragma once
#include "cuda/sm90/conv3x3_tile.cuh"

namespace sbnet::sm90 {

// Warp 16: walks this CTA's tiles, tells the other warps about each and loads its input patches.
//
// Cluster c of the launch computes tiles c, c + clusters, ... If their number is odd, its two CTAs share the first (the
// sums are exchanged under the cover of the whole tiles that follow); then they take whole tiles in turn. When there
// are fewer tiles than half the clusters, cluster c gets a half of tile c / 2. Nothing but the count decides.
template <class C>
__device__ void produce_patches(const Args& a, const CUtensorMap* map_x, uint32_t smem, typename C::Tile* tiles) {
  constexpr unsigned kAll = 0xffffffff;
  const int lane = threadIdx.x & 31, ctas = 1 << a.log_cluster, rank = blockIdx.x & (ctas - 1);
  const int cluster = blockIdx.x >> a.log_cluster, clusters = gridDim.x >> a.log_cluster, taps = a.slices * 9;

  // Each lane finds one square, strip or cell of the cluster's next tiles. The rows of the first ones are asked for
  // together with the count, which they turn out to need or not; their addresses before the previous kernel is done.
  int first = 0, loaded = 0, count = 0;
  uint32_t row, sub_y, sub_x;
  int4 unit;
  constexpr int kBatch = 32 / C::kUnits - 1;  // tiles per look-up; the last lanes look up the one to take a half of
  auto aim = [&](int m) {
    uint32_t sub;
    const uint32_t tile = lane / C::kUnits == kBatch ? cluster / 2 : cluster + (m + lane / C::kUnits) * clusters;
    a.units_per_block.divmod(a.ktiles.quotient(tile) * C::kUnits + lane % C::kUnits, &row, &sub);
    a.units_per_row.divmod(sub, &sub_y, &sub_x);
    first = m;
  };
  auto locate = [&] {
    int n = -1, i = 0, j = 0;
    if (row < static_cast<uint32_t>(a.capacity)) {
      const int32_t* p = a.blocks + static_cast<int64_t>(row) * 3;
      n = load_int(p), i = load_int(p + 1), j = load_int(p + 2);
    }
    count = min(max(loaded, 0), a.capacity);
    const bool valid = row < static_cast<uint32_t>(count) && static_cast<uint32_t>(n) < static_cast<uint32_t>(a.N) &&
                       static_cast<uint32_t>(i) < static_cast<uint32_t>(a.grid_h) &&
                       static_cast<uint32_t>(j) < static_cast<uint32_t>(a.grid_w);
    unit = valid ? make_int4(n, i * a.block_h + sub_y * C::kUnitHeight, j * a.block_w + sub_x * C::kUnitWidth, 0)
                 : make_int4(-1, 0, 0, 0);
    if (unit.y >= a.H || unit.z >= a.W) unit.x = -1;  // a block may reach over the edge of the plane
  };
  aim(0);
  grid_dependency_wait();
  loaded = load_int(a.count);
  locate();

  const int units = count * static_cast<int>(a.units_per_block.divisor);
  const int total = (units + C::kUnits - 1) / C::kUnits * static_cast<int>(a.ktiles.divisor);
  const bool narrow = !C::kResident && ctas == 2 && total * 2 <= clusters;
  const int own = narrow ? cluster < total * 2 : total > cluster ? a.clusters.quotient(total - cluster - 1) + 1 : 0;
  const int shared = own & (ctas - 1);
  int made = 0, slice = 0, tap = 0;
  bool exchanged = false;
  for (int m = shared ? 0 : rank; m < own; m += m < shared ? shared + rank : ctas) {
    const bool share = m < shared;
    const int v0 = share && rank ? taps / 2 : 0, v1 = share && !rank ? taps / 2 : taps;
    if (m >= first + kBatch) {
      aim(m);
      locate();
    }
    const bool mine = lane / C::kUnits == (narrow ? kBatch : m - first);
    if (!__any_sync(kAll, mine && unit.x >= 0)) continue;
    const int slot = made % C::kTileSlots;
    if (lane == 0) mbar_wait(smem + C::kTileEmpty + 8 * slot, ((made / C::kTileSlots) & 1) ^ 1);
    __syncwarp();
    typename C::Tile& tile = tiles[slot];
    if (mine) tile.unit[lane % C::kUnits] = unit;
    if (lane == 0) {
      const uint32_t t = narrow ? cluster / 2 : cluster + m * clusters;
      tile.k0 = static_cast<int>(t - a.ktiles.quotient(t) * a.ktiles.divisor) * 64;
      tile.v0 = v0, tile.v1 = v1, tile.slice = slice, tile.tap = tap;
      tile.work = !share ? Work::kWhole : narrow ? Work::kNarrow : Work::kShared;
      tile.side = cluster & 1;
      tile.guard = exchanged && made == 1;
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + C::kTileFull + 8 * slot);
    for (int c = v0 / 9; c * 9 < v1; ++c, ++slice) {
      const int stage = slice % C::kPatchStages, phase = (slice / C::kPatchStages) & 1;
      const uint32_t full = smem + C::kPatchFull + 8 * stage, to = smem + C::kPatchesAt + stage * C::kPatchPitch;
      if (lane == 0) {
        mbar_wait(smem + C::kPatchEmpty + 8 * stage, phase ^ 1);
        mbar_expect(full, C::kPatch);
      }
      if constexpr (C::kCells) {  // TMA cannot leave gaps between rows: a box per row
        __syncwarp();
        for (int r = lane; r < C::kGroup * 20; r += 32) {
          const int4 at = tile.unit[r / 20 * 2 + r % 2];
          tma_load(to + r * 10 * 128, map_x, full, c * 64, at.z - 1, at.y - 1 + r % 20 / 2, at.x);
        }
      } else if (lane == 0) {
#pragma unroll
        for (int u = 0; u < C::kUnits; ++u) {
          const int4 at = tile.unit[u];
          tma_load(to + u * C::kHalf, map_x, full, c * 64, at.z - 1, at.y - 1, at.x);
        }
      }
    }
    tap += v1 - v0;
    exchanged = exchanged || share;
    ++made;
  }
  for (int g = 0; g < C::kGroups; ++g, ++made) {
    if (lane == 0) {
      const int slot = made % C::kTileSlots;
      mbar_wait(smem + C::kTileEmpty + 8 * slot, ((made / C::kTileSlots) & 1) ^ 1);
      tiles[slot].v1 = 0;
      mbar_arrive(smem + C::kTileFull + 8 * slot);
    }
  }
}

// Warp 17, one lane: the weights of one tap after the other; with resident weights all nine, once.
template <class C>
__device__ void produce_weights(const CUtensorMap* map_w, uint32_t smem, const typename C::Tile* tiles) {
  grid_dependency_wait();
  if constexpr (C::kResident) {
    for (int q = 0; q < 9; ++q) {
      mbar_expect(smem + C::kWeightFull + 8 * q, kTap);
      tma_load(smem + C::kWeightsAt + q * kTap, map_w, smem + C::kWeightFull + 8 * q, 0, q, 0);
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
        mbar_expect(full, kTap);
        tma_load(smem + C::kWeightsAt + stage * kTap, map_w, full, v / 9 * 64, v % 9, k0);
        if (++stage == C::kWeightStages) stage = 0, phase ^= 1;
      }
    }
  }
}

// Warps 18 and 19 of every CTA: zero the K channels of the listed pixels, eight lanes to a pixel. The pixels are dealt
// out one to each team before any gets a second: a short list must not become the launch's longest job.
template <class T>
__device__ void zero_fringe(const Args& a) {
  grid_dependency_wait();
  const int lane = threadIdx.x & 31, member = lane & 7,
            count = min(max(load_int(a.fringe_count), 0), a.fringe_capacity);
  const int team = (blockIdx.x * 2 + (threadIdx.x / 32 & 1)) * 4 + lane / 8, teams = gridDim.x * 8;
  for (int64_t base = 0; base < count; base += teams * 8) {
    const int64_t at = base + member * teams + team;
    int64_t offset = -1;
    if (at < count) {
      uint32_t line, x, n, y;
      const int pixel = load_int(a.fringe + at);
      a.plane_w.divmod(pixel, &line, &x);
      a.plane_h.divmod(line, &n, &y);
      if (pixel >= 0 && n < static_cast<uint32_t>(a.N)) offset = n * a.y.n + y * a.y.y + x * a.y.x;
    }
    for (int m = 0; m < 8; ++m) {
      const int64_t to = __shfl_sync(0xffffffff, offset, m, 8);
      if (to < 0) continue;
      uint4* p = reinterpret_cast<uint4*>(static_cast<T*>(a.y.data) + to);
      for (int c = member; c < a.K / 8; c += 8) p[c] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace sbnet::sm90
