// How a launch of the fused bottleneck block is cut: its arguments and shared memory. See bottleneck.cu.
#pragma once
#include "core/bottleneck.h"
#include "cuda/sm90/conv_host.cuh"

namespace sbnet::sm90::neck {

constexpr int kThreads = 384, kConsumers = 256, kMaxSlices = 8, kMaxStages = 40, kSlots = 4, kMaxWidth = 128;
constexpr int kPatchSide = 10, kPatchPixels = kPatchSide * kPatchSide, kSlice = kPatchPixels * 128, kH1 = 112 * 128,
              kH2 = 64 * 128, kOut = 64 * 128;

constexpr int kXFull = 0, kXEmpty = kXFull + 8 * 2 * kMaxSlices, kWFull = kXEmpty + 8 * 2;
constexpr int kWEmpty = kWFull + 8 * kMaxStages, kTileFull = kWEmpty + 8 * kMaxStages,
              kTileEmpty = kTileFull + 8 * kSlots;
constexpr int kBarriersEnd = kTileEmpty + 8 * kSlots, kUnitsAt = (kBarriersEnd + 15) / 16 * 16;
constexpr int kBias1At = kUnitsAt + 16 * kSlots, kBias2At = kBias1At + kMaxWidth * 4;
constexpr int kBias3At = kBias2At + kMaxWidth * 4;
constexpr int kControl = 4096;
static_assert(kBias3At + kMaxSlices * 64 * 4 <= kControl);

struct Maps {
  CUtensorMap x, w1, w2, w3, y;
};
struct Args : CommonArgs {
  const void *bias1, *bias2;  // of h1, h2; bias is y's
  const int32_t* block_map;
  int width, slices, slabs;    // channels of h1 and h2; slabs of 64 channels of x, of h1 and h2
  int weights, stages, pitch;  // slabs of weights of a tile; of the ring; bytes of one
  int buffers, h2_at, out_at, x_at, ring_at;
  bool resident;
  FastDiv units_per_block, units_per_row, block_rows, block_columns;
};

// ---------------------------------------------------------------- host
// The narrowest kernel that holds h1's channels.
inline int padded(int64_t width) { return width <= 32 ? 32 : width <= 64 ? 64 : width <= 96 ? 96 : kMaxWidth; }

// Shared memory: all weights if they fit, beside two patches or one; otherwise a ring.
inline void lay_out(const BottleneckParams& p, Args* a) {
  const int n = padded(p.weight[0].size[0]);
  a->width = static_cast<int>(p.weight[0].size[0]);
  a->slices = static_cast<int>((p.x.size[1] + 63) / 64);
  a->slabs = n > 64 ? 2 : 1;
  a->weights = a->slices + 9 * a->slabs + a->slices * a->slabs;
  a->pitch = (n > 64 ? n : 64) * 128;
  a->h2_at = kControl + a->slabs * kH1;
  a->out_at = a->h2_at + a->slabs * kH2;
  a->x_at = a->out_at + 2 * kOut;
  for (a->buffers = 2; a->buffers > 0; --a->buffers) {
    a->ring_at = (a->x_at + a->buffers * a->slices * kSlice + 1023) / 1024 * 1024;
    a->stages = (kSharedLimit - a->ring_at) / a->pitch;
    a->resident = a->stages >= a->weights;
    if (a->resident || a->buffers == 1) break;
  }
  a->stages = a->resident ? a->weights : a->stages < kMaxStages ? a->stages : kMaxStages;
}

}  // namespace sbnet::sm90::neck
