// The producer warps of the fused bottleneck block: which cells a CTA computes, their input, the weights.
#pragma once
#include "cuda/sm90/bottleneck_plan.cuh"

namespace sbnet::sm90::neck {

// Warp 8. The w of a unit: a bit for each of the 3x3 cells around it, set if that is active; kLast: no tile.
constexpr int kLast = 1 << 9;

__device__ __forceinline__ void produce_patches(const Args& a, const Maps& maps, uint32_t smem, int4* units) {
  const int lane = threadIdx.x & 31;
  grid_dependency_wait();
  const int count = min(max(load_int(a.count), 0), a.capacity),
            total = count * static_cast<int>(a.units_per_block.divisor);
  int made = 0;
  auto announce = [&](int4 unit) {
    const int slot = made % kSlots;
    if (lane == 0) {
      mbar_wait(smem + kTileEmpty + 8 * slot, ((made / kSlots) & 1) ^ 1);
      units[slot] = unit;
      mbar_arrive(smem + kTileFull + 8 * slot);
    }
    __syncwarp();
  };
  for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
    uint32_t row, sub, sub_y, sub_x;
    a.units_per_block.divmod(tile, &row, &sub);
    a.units_per_row.divmod(sub, &sub_y, &sub_x);
    int4 unit = unit_of_block(a, load_row(a, row), true, sub_y * 8, sub_x * 8);
    int slot = -1;  // of the block of one of the 3x3 cells around; needed when the patch is on its way
    if (lane < 9 && unit.x >= 0) {
      const int y = unit.y + (lane / 3 - 1) * 8, x = unit.z + (lane % 3 - 1) * 8;
      if (y >= 0 && x >= 0 && y < a.H && x < a.W) {
        const int i = a.block_rows.quotient(y), j = a.block_columns.quotient(x);
        slot = load_int(a.block_map + (static_cast<int64_t>(unit.x) * a.grid_h + i) * a.grid_w + j);
      }
    }
    const int buffer = made % a.buffers;
    if (lane == 0) {
      mbar_wait(smem + kXEmpty + 8 * buffer, ((made / a.buffers) & 1) ^ 1);
      for (int c = 0; c < a.slices; ++c) {
        const uint32_t full = smem + kXFull + 8 * (buffer * kMaxSlices + c);
        mbar_expect(full, kSlice);
        tma_load(smem + a.x_at + (buffer * a.slices + c) * kSlice, &maps.x, full, c * 64, unit.z - 1, unit.y - 1,
                 unit.x);
      }
    }
    __syncwarp();
    unit.w = __ballot_sync(0xffffffff, slot >= 0 && slot < count);
    announce(unit);
    ++made;
  }
  announce(make_int4(0, 0, 0, kLast));
}

// One lane of warp 9: the slabs of weights in their order, once or for each tile.
template <int kN>
__device__ __forceinline__ void load_weights(const Args& a, const Maps& maps, uint32_t smem, int tiles) {
  int stage = 0, phase = 1;
  auto next = [&](int bytes, auto load) {
    const uint32_t full = smem + kWFull + 8 * stage;
    mbar_wait(smem + kWEmpty + 8 * stage, phase);
    mbar_expect(full, bytes);
    load(smem + a.ring_at + stage * a.pitch, full);
    if (++stage == a.stages) stage = 0, phase ^= 1;
  };
  for (int i = 0; i < tiles; ++i) {
    for (int c = 0; c < a.slices; ++c)
      next(kN * 128, [&](uint32_t to, uint32_t full) { tma_load(to, &maps.w1, full, c * 64, 0); });
    for (int q = 0; q < 9 * a.slabs; ++q)
      next(kN * 128,
           [&](uint32_t to, uint32_t full) { tma_load(to, &maps.w2, full, q % a.slabs * 64, q / a.slabs, 0); });
    for (int q = 0; q < a.slices * a.slabs; ++q)
      next(64 * 128,
           [&](uint32_t to, uint32_t full) { tma_load(to, &maps.w3, full, q % a.slabs * 64, q / a.slabs * 64); });
  }
}

}  // namespace sbnet::sm90::neck
