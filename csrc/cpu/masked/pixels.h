// How layers walk the active blocks on the CPU: threads take rows of blocks.
#pragma once
#include <algorithm>

#include "core/by_dtype.h"
#include "cpu/lists/fringe.h"
#include "cpu/simd/half.h"

namespace sbnet {

// Runs body(n, row, begin, end) for the columns of each row of each active block of p.y's plane, and zeroes the fringe.
// `pixel_work`: roughly the arithmetic of a pixel.
template <class Params, class Body>
void for_rows(const Params& p, int64_t pixel_work, const Parallel& parallel, const Body& body) {
  const BlockGrid& grid = p.active.grid;
  const int64_t blocks = std::clamp<int64_t>(*p.active.count, 0, p.active.capacity);
  // A block larger than the plane is the only one of its direction.
  const int64_t height = std::min<int64_t>(grid.size[0], p.y.size[2]);
  const int64_t width = std::min<int64_t>(grid.size[1], p.y.size[3]);
  parallel_for(parallel, blocks * height, 1 + 65536 / (width * pixel_work), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t* block = p.active.indices + 3 * (r / height);
      const int64_t n = block[0], i = block[1], j = block[2];
      if (n < 0 || n >= p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
      const int64_t row = i * grid.size[0] + r % height, column = j * grid.size[1];
      if (row < p.y.size[2]) body(n, row, column, std::min(column + width, p.y.size[3]));
    }
  });
  zero_fringe(p.y, p.fringe, parallel);
}

// What the entry points of these layers are: run(T{}) with x's element type, if the params are valid.
template <class Params, class Run>
Status run_by_dtype(const Params& p, const Run& run) {
  SBNET_TRY(validate(p));
  if (p.x.size[0]) by_dtype<Half, BFloat16>(p.x.dtype, run);
  return ok_status();
}

}  // namespace sbnet
