// The producer warps of the Hopper 1x1 convolutions: which tiles a CTA computes, their input, the weights.
#pragma once
#include "cuda/sm90/conv/conv1x1_plan.cuh"

namespace sbnet::sm90::conv1x1_detail {

// In the w of a unit. Of a tile that is none: kEnd, or, of wide tiles alone, kSkipAndEnd.
constexpr int kEnd = 1, kSkipAndEnd = 2, kFlat = 4;

// Tile j of group g of this CTA: pixels of tile column + columns * (g + groups * j) of the list (streamed wide tiles
// have an order of their own).
struct Schedule {
  int ktile, column, columns;
  __device__ __forceinline__ explicit Schedule(const Args& a) {
    const int cluster = blockIdx.x >> a.log_cluster;
    column = a.ktiles.quotient(cluster);
    ktile = cluster - column * a.ktiles.divisor;
    columns = a.ktiles.quotient(gridDim.x >> a.log_cluster);
  }
};

// Each lane of a producer warp finds one unit (cell) of one of the next tiles: unit lane % a.units of the tile that it
// is aimed at. Where the list is taken as flat, a unit is the pixels from (0, 0, z) on, kFlat.
struct Finder {
  const Args& a;
  int lane, log_units, member, count = 0;
  bool flat = false;
  uint32_t index, row, sub_y, sub_x;
  int4 unit;
  __device__ __forceinline__ explicit Finder(const Args& args) : a(args) {
    lane = threadIdx.x & 31, log_units = __ffs(a.units) - 1, member = lane & (a.units - 1);
  }
  __device__ __forceinline__ int ahead() const { return lane >> log_units; }
  __device__ __forceinline__ int batch() const { return 32 >> log_units; }
  __device__ __forceinline__ void aim(uint32_t tile) {
    uint32_t sub;
    index = tile * a.units + member;
    a.units_per_block.divmod(index, &row, &sub);
    a.units_per_row.divmod(sub, &sub_y, &sub_x);
  }
  __device__ __forceinline__ void resolve(int4 block) {
    if (flat) {
      const uint32_t pixel = index * (a.side * a.side);
      unit = make_int4(pixel < static_cast<uint32_t>(a.pixels) ? 0 : -1, 0, pixel, kFlat);
      return;
    }
    unit = unit_of_block(a, block, row < static_cast<uint32_t>(count), sub_y * a.side, sub_x * a.side);
  }
  __device__ __forceinline__ void find() { resolve(load_row(a, row)); }
  // Once, after the first aim(): the rows of the first tiles are asked for together with the count. Returns how many
  // tiles the list has.
  __device__ __forceinline__ int begin() {
    await_settled(a);
    const int loaded = load_int(a.count);
    const int4 block = load_row(a, row);
    count = min(max(loaded, 0), a.capacity);
    flat = a.flat_count >= 0 && loaded == a.flat_count;
    resolve(block);
    const int cell = a.side * a.side;
    const int cells = flat ? (a.pixels + cell - 1) / cell : count * static_cast<int>(a.units_per_block.divisor);
    return (cells + a.units - 1) / a.units;
  }
};

// Slice c of a unit's input; cells that are not there come as zeros.
__device__ __forceinline__ void load_input(const Args& a, uint32_t to, const CUtensorMap* map, uint32_t full, int c,
                                           const int4& unit) {
  if (!a.patches && !a.taps) return tma_load(to, map, full, c * 64, unit.z, unit.y, unit.x);
  uint32_t row, slice;
  a.row_slices.divmod(c, &row, &slice);
  if (a.patches) return tma_load(to, map, full, slice * 64, unit.z, unit.y, row, unit.x);
  uint32_t ty, tx;
  a.tap_columns.divmod(row, &ty, &tx);
  const int y = unit.y + static_cast<int>(ty) * a.dilation[0] - a.padding[0];
  tma_load(to, map, full, slice * 64, unit.z + static_cast<int>(tx) * a.dilation[1] - a.padding[1], y, unit.x);
}

// Tells group `group` a unit of its tile `made`. The lane that found it arrives on the barrier itself: no warp sync.
__device__ __forceinline__ void announce_unit(uint32_t smem, int4* units, int group, int made, int member, int4 unit) {
  const int slot = group * kTileSlots + made % kTileSlots;
  mbar_wait(smem + kTileEmpty + 8 * slot, ((made / kTileSlots) & 1) ^ 1);
  units[slot * kMaxUnits + member] = unit;
  mbar_arrive(smem + kTileFull + 8 * slot);
}

// The producer warp of a group: walks the tiles of group g, tells its warpgroups about each and loads its input.
__device__ __forceinline__ void produce(const Args& a, const Maps& maps, uint32_t smem, int4* units, int group) {
  const Schedule at(a);
  const int first_tile = at.column + at.columns * group, step = at.columns * a.groups;
  Finder finder(a);
  const int lane = finder.lane, member = finder.member;
  int first = 0;
  finder.aim(first_tile + finder.ahead() * step);
  const int total = finder.begin();
  const int ring = a.ring_at + group * a.stages * a.stage_bytes, k0 = at.ktile * a.slabs * 64;
  const int expected = a.units * a.cell + (a.resident ? 0 : a.slabs * kSlab);
  auto expect = [&](int stage, int c) {  // one lane: slice c, and its weights unless they are resident
    const uint32_t full = smem + kFull + 8 * (group * kMaxStages + stage), to = smem + ring + stage * a.stage_bytes;
    mbar_expect(full, expected);
    if (a.resident) return;
    for (int s = 0; s < a.slabs; ++s) tma_load(to + a.units * a.cell + s * kSlab, &maps.w, full, c * 64, k0 + s * 64);
  };
  int made = 0, stage = 0, phase = 1;
  for (int j = 0, tile = first_tile; tile < total; ++j, tile += step) {
    if (j >= first + finder.batch()) {
      finder.aim(tile + finder.ahead() * step);
      finder.find();
      first = j;
    }
    const int4 unit = finder.unit;
    const bool mine = finder.ahead() == j - first;
    const unsigned live = __ballot_sync(0xffffffff, mine && unit.x >= 0);
    if (!live) continue;
    if (mine) announce_unit(smem, units, group, made, member, unit);
    // The first tile's weights set out before the launch ahead has ended, as many as there is room for.
    const int ahead = made == 0 ? min(a.slices, a.stages) : 0;
    if (made == 0) {
      if (lane == 0)
        for (int c = 0; c < ahead; ++c) expect(c, c);
      grid_dependency_wait();
    }
    for (int c = 0; c < a.slices; ++c) {
      if (lane == 0 && c >= ahead) {
        mbar_wait(smem + kEmpty + 8 * (group * kMaxStages + stage), phase);
        expect(stage, c);
      }
      __syncwarp();
      const uint32_t full = smem + kFull + 8 * (group * kMaxStages + stage), to = smem + ring + stage * a.stage_bytes;
      if (mine) load_input(a, to + member * a.cell, &maps.of[finder.flat].x, full, c, unit);
      if (++stage == a.stages) stage = 0, phase ^= 1;
    }
    ++made;
  }
  if (lane < a.units) announce_unit(smem, units, group, made, lane, make_int4(0, 0, 0, kEnd));
}

// One lane: resident weights.
__device__ __forceinline__ void load_weights(const Args& a, const CUtensorMap* map, uint32_t smem) {
  const int k0 = Schedule(a).ktile * a.slabs * 64;
  for (int c = 0; c < a.slices; ++c) {
    const uint32_t full = smem + kWeightFull + 8 * c;
    mbar_expect(full, a.slabs * kSlab);
    for (int s = 0; s < a.slabs; ++s)
      tma_load(smem + a.weights_at + (c * a.slabs + s) * kSlab, map, full, c * 64, k0 + s * 64);
  }
}

// Of the tiles that producers have told of.
__device__ __forceinline__ int4* units_of(uint8_t* shared) { return reinterpret_cast<int4*>(shared + kUnitsAt); }

// All threads, of which there are kCtaThreads. readers: warps that give a stage of a ring back; finishers: those that
// give back what a tile is.
template <int kCtaThreads>
__device__ __forceinline__ void init_barriers(const Args& a, const Cta& cta, int readers, int finishers) {
  cta.init_barriers(kFull, kBarriersEnd, kCtaThreads / 32, [&](int at) {
    const bool of_ring = at >= kEmpty && at < kTileFull, of_tile = at >= kTileEmpty && at < kResidualFull;
    const bool announced = at >= kTileFull && at < kTileEmpty;
    return of_ring ? readers : of_tile ? finishers : announced ? a.units : 1;
  });
  __syncthreads();
}

// A consumer's products of a tile: multiply(weights, pixels, accumulate) of 16 channels at a time. It has given back
// all stages but the last one when it returns; that one's barrier is what it returns.
template <class Multiply>
__device__ __forceinline__ uint32_t multiply_slices(const Args& a, uint32_t smem, int group, uint32_t slabs,
                                                    uint32_t pixels, bool await_weights, int& stage, int& phase,
                                                    const Multiply& multiply) {
  uint32_t read = 0;  // of the stage that the slice before the last one issued has read
  for (int c = 0; c < a.slices; ++c) {
    const uint32_t empty = smem + kEmpty + 8 * (group * kMaxStages + stage);
    if (await_weights) mbar_wait(smem + kWeightFull + 8 * c, 0);
    mbar_wait(smem + kFull + 8 * (group * kMaxStages + stage), phase);
    const uint32_t dp = pixels + stage * (a.stage_bytes >> 4);
    const uint32_t dw = slabs + (a.resident ? c * a.wide * (kSlab >> 4) : stage * (a.stage_bytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(wgmma_layout(1024) | (dw + k * 2), wgmma_layout(1024) | (dp + k * 2), c | k);
    wgmma_commit();
    wgmma_wait<1>();
    if ((threadIdx.x & 31) == 0 && read) mbar_arrive(read);
    read = empty;
    if (++stage == a.stages) stage = 0, phase ^= 1;
  }
  return read;
}

// The last two warps: weights that stay, if this is the thread that loads them, then clear(): zeros of the fringe.
template <class Clear>
__device__ __forceinline__ void load_and_clear(const Args& a, const CUtensorMap* weights, uint32_t smem, bool loads,
                                               const Clear& clear) {
  await_settled(a);
  if (loads) load_weights(a, weights, smem);
  __syncwarp();
  take_turn();
  clear();
  if (loads)  // never exit with loads in flight
    for (int c = 0; c < a.slices; ++c) mbar_wait(smem + kWeightFull + 8 * c, 0);
}

}  // namespace sbnet::sm90::conv1x1_detail
