// Where blocks lie, for the CPU's block copies. Everything here is static: files of several instruction sets include
// it.
#pragma once
#include "core/masked/gather_scatter.h"

namespace sbnet {

static inline int64_t clamped_count(const BlockCopyParams& p) {
  const int64_t most = p.active.capacity < p.blocks.size[0] ? p.active.capacity : p.blocks.size[0];
  const int64_t count = *p.active.count;
  return count < 0 ? 0 : count < most ? count : most;
}

// A block on the plane: its corner lies at (n, y, x), perhaps outside; rows [row0, row1) and columns [column0,
// column1), counted from the corner, lie on the plane. None where the slot names no block.
struct BlockPart {
  int64_t n, y, x, row0, row1, column0, column1;
};

static inline BlockPart block_part(const BlockCopyParams& p, int64_t slot, int64_t count) {
  const BlockGrid& g = p.active.grid;
  if (slot >= count) return {};
  const int32_t* at = p.active.indices + slot * 3;
  if (at[0] < 0 || at[0] >= p.plane.size[0] || at[1] < 0 || at[1] >= g.count[0] || at[2] < 0 || at[2] >= g.count[1])
    return {};
  int64_t corner[2], begin[2], end[2];
  for (int d = 0; d < 2; ++d) {
    corner[d] = g.offset[d] + int64_t{at[1 + d]} * g.stride[d];
    const int64_t room = p.plane.size[2 + d] - corner[d];
    begin[d] = corner[d] < 0 ? -corner[d] : 0;
    end[d] = room < g.size[d] ? room : g.size[d];
    if (begin[d] >= end[d]) return {};
  }
  return {at[0], corner[0], corner[1], begin[0], end[0], begin[1], end[1]};
}

template <class T>
static inline T* element(const TensorView& t, int64_t n, int64_t c, int64_t y, int64_t x) {
  return static_cast<T*>(t.data) + n * t.stride[0] + c * t.stride[1] + y * t.stride[2] + x * t.stride[3];
}

}  // namespace sbnet
