// The fringe of a tensor: the pixels that a consumer's active blocks read and no active block of the producer writes.
// They must read as zero; a producing layer zeroes them while it writes its blocks (FringeView in core/conv.h).
#pragma once
#include "core/types.h"

namespace sbnet {

struct FringeParams {
  ActiveView producer;                                    // tiling grid of the tensor's own plane; needs block_map
  ActiveView consumer;                                    // tiling grid of the consumer's output plane; needs block_map
  int64_t batch, height, width;                           // of the tensor
  int64_t out_height, out_width;                          // of the consumer's output
  int32_t kernel[2], stride[2], padding[2], dilation[2];  // of the consumer
  int64_t capacity;
  int32_t* pixels;  // [capacity] out: linear indices (n*height + y)*width + x, ascending, then -1
  int32_t* count;   // [1] out: min(fringe pixels, capacity)
};

SBNET_EXPORT Status validate(const FringeParams& p);

// Does an active block of the consumer read row/column coordinate v? Calls visit(block) for each block coordinate along
// dimension `dim` that reads it, until visit returns true.
template <class Visit>
SBNET_HOST_DEVICE bool any_reader(const FringeParams& p, int dim, int64_t v, Visit visit) {
  const int64_t limit = dim == 0 ? p.out_height : p.out_width;
  int64_t last = -1;
  for (int32_t tap = 0; tap < p.kernel[dim]; ++tap) {
    const int64_t t = v + p.padding[dim] - static_cast<int64_t>(tap) * p.dilation[dim];
    if (t < 0) break;
    const int64_t out = t / p.stride[dim];
    if (out * p.stride[dim] != t || out >= limit) continue;
    const int64_t block = out / p.consumer.grid.size[dim];
    if (block != last && visit(block)) return true;
    last = block;
  }
  return false;
}

// Is pixel (n, y, x) of the tensor in the fringe?
SBNET_HOST_DEVICE inline bool in_fringe(const FringeParams& p, int64_t n, int64_t y, int64_t x) {
  const BlockGrid &mine = p.producer.grid, &theirs = p.consumer.grid;
  const int64_t own = (n * mine.count[0] + y / mine.size[0]) * mine.count[1] + x / mine.size[1];
  if (p.producer.block_map[own] >= 0) return false;
  return any_reader(p, 0, y, [&](int64_t i) {
    return any_reader(
        p, 1, x, [&](int64_t j) { return p.consumer.block_map[(n * theirs.count[0] + i) * theirs.count[1] + j] >= 0; });
  });
}

}  // namespace sbnet

extern "C" {
SBNET_EXPORT int64_t sbnet_fringe_workspace_bytes(const sbnet::FringeParams* p);
SBNET_EXPORT sbnet::Status sbnet_fringe_cpu(const sbnet::FringeParams* p, void* workspace,
                                            const sbnet::Parallel* parallel);
SBNET_EXPORT sbnet::Status sbnet_fringe_cuda(const sbnet::FringeParams* p, void* workspace, void* stream);
}
