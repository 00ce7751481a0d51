// The rows of a matrix that is a TensorView [N, F, H, W]: all pixels, or those of active blocks.
#pragma once
#include "core/types.h"

namespace sbnet {

// Rows in which a kernel can meet the matrix `t`: for active blocks those of the whole capacity, clipped pixels
// included. Kernels clamp the list's count themselves.
SBNET_HOST_DEVICE inline int64_t row_capacity(const TensorView& t, const ActiveView& active) {
  return active.given() ? active.capacity * active.grid.size[0] * active.grid.size[1]
                        : t.size[0] * t.size[2] * t.size[3];
}

struct RowPixel {
  int64_t n, row, column;  // n < 0: the row is no pixel of the plane
};

SBNET_HOST_DEVICE inline RowPixel row_pixel(const TensorView& t, const ActiveView& active, int64_t r) {
  if (!active.given()) {
    if (t.size[2] == 1 && t.size[0] == 1) return {0, 0, r};  // a plain matrix: no divisions
    return {r / (t.size[2] * t.size[3]), r / t.size[3] % t.size[2], r % t.size[3]};
  }
  const BlockGrid& grid = active.grid;
  const int64_t pixels = int64_t{grid.size[0]} * grid.size[1], slot = r / pixels, pixel = r % pixels;
  const int32_t* block = active.indices + slot * 3;
  const int64_t row = int64_t{block[1]} * grid.size[0] + pixel / grid.size[1];
  const int64_t column = int64_t{block[2]} * grid.size[1] + pixel % grid.size[1];
  const bool inside =
      block[0] >= 0 && block[0] < t.size[0] && block[1] >= 0 && row < t.size[2] && block[2] >= 0 && column < t.size[3];
  return {inside ? block[0] : -1, row, column};
}

// Elements from the matrix's first to this row's first; -1 for a row that is none.
SBNET_HOST_DEVICE inline int64_t row_offset(const TensorView& t, const RowPixel& at) {
  return at.n < 0 ? -1 : at.n * t.stride[0] + at.row * t.stride[2] + at.column * t.stride[3];
}

}  // namespace sbnet
