// reduce_mask on the CPU: one byte a block in parallel, then one pass that numbers the active ones.
#include "core/lists/reduce_mask.h"

#include <algorithm>

#include "cpu/lists/mask.h"

namespace sbnet {
namespace {

template <class T>
double value(T v) {
  return as_float(v);
}
template <>
double value<double>(double v) {
  return v;
}

// The part of blocks along dimension d that lies on the plane: coordinates [begin, end).
struct Part {
  int64_t begin, end;
};
Part part_on_plane(const ReduceMaskParams& p, int d, int64_t block) {
  const int64_t start = p.grid.offset[d] + block * p.grid.stride[d], end = start + p.grid.size[d];
  const int64_t begin = std::clamp<int64_t>(start, 0, p.size[1 + d]);
  return {begin, std::clamp(end, begin, p.size[1 + d])};
}

bool above_average(const ReduceMaskParams& p, double sum) {
  const double area = static_cast<double>(p.grid.size[0]) * p.grid.size[1];
  return static_cast<float>(sum / area) > static_cast<float>(p.tol);
}

template <class T>
bool pool(const ReduceMaskParams& p, int64_t n, int64_t i, int64_t j) {
  const auto [y0, y1] = part_on_plane(p, 0, i);
  const auto [x0, x1] = part_on_plane(p, 1, j);
  const T* image = static_cast<const T*>(p.mask) + n * p.stride[0];
  double sums[8] = {0};  // eight chains of additions, so that they run side by side
  for (int64_t y = y0; y < y1; ++y) {
    const T* row = image + y * p.stride[1];
    if (p.avgpool) {
      int64_t x = x0;
      if (p.stride[2] == 1)
        for (; x + 8 <= x1; x += 8)
          for (int64_t lane = 0; lane < 8; ++lane) sums[lane] += value(row[x + lane]);
      for (; x < x1; ++x) sums[0] += value(row[x * p.stride[2]]);
    } else {
      bool any = false;
      if (p.stride[2] == 1)
        for (int64_t x = x0; x < x1; ++x) any |= above(row[x], p.tol);
      else
        for (int64_t x = x0; x < x1; ++x) any |= above(row[x * p.stride[2]], p.tol);
      if (any) return true;
    }
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  return p.avgpool && above_average(p, sum);
}

// Blocks that overlap: columns are reduced once for a row of blocks, then columns to blocks, so that a pixel is not
// read once for each block over it. `columns`: scratch, a double for each column of the plane.
template <class T>
void pool_overlapping(const ReduceMaskParams& p, int64_t begin, int64_t end, double* columns, uint8_t* active) {
  const int64_t rows = p.grid.count[0], W = p.size[2];
  int64_t image = -1, next = 0;  // rows of the image before `next` have been seen
  for (int64_t r = begin; r < end; ++r) {
    const Part y = part_on_plane(p, 0, r % rows);
    if (p.avgpool || r / rows != image) {
      std::fill_n(columns, W, p.avgpool ? 0.0 : -1.0);
      next = y.begin;
    }
    image = r / rows;
    for (int64_t row = std::max(next, y.begin); row < y.end; ++row) {
      const T* at = static_cast<const T*>(p.mask) + image * p.stride[0] + row * p.stride[1];
      if (p.avgpool)
        for (int64_t x = 0; x < W; ++x) columns[x] += value(at[x * p.stride[2]]);
      else  // the last row in which a column is set
        for (int64_t x = 0; x < W; ++x) columns[x] = above(at[x * p.stride[2]], p.tol) ? row : columns[x];
    }
    next = std::max(next, y.end);
    int64_t last = -1, seen = 0;  // the last column before `seen` that is set in these rows
    for (int64_t j = 0; j < p.grid.count[1]; ++j) {
      const Part x = part_on_plane(p, 1, j);
      if (p.avgpool) {
        double sum = 0;
        for (int64_t c = x.begin; c < x.end; ++c) sum += columns[c];
        active[r * p.grid.count[1] + j] = above_average(p, sum);
      } else {
        for (; seen < x.end; ++seen)
          if (columns[seen] >= y.begin) last = seen;
        active[r * p.grid.count[1] + j] = y.begin < y.end && last >= x.begin && x.begin < x.end;
      }
    }
  }
}

template <class T>
void pool_all(const ReduceMaskParams& p, uint8_t* active, const Parallel& parallel) {
  const int64_t rows = p.grid.count[0], columns = p.grid.count[1];
  if (p.grid.overlaps()) {
    const int64_t slices = reduce_mask_slices(p), block_rows = p.size[0] * rows;
    double* scratch = reinterpret_cast<double*>(active + reduce_mask_block_bytes(p));
    return parallel_for(parallel, slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s)
        pool_overlapping<T>(p, block_rows * s / slices, block_rows * (s + 1) / slices, scratch + s * p.size[2], active);
    });
  }
  const int64_t block_rows_worth_a_thread = 1 + 4096 / (columns * p.grid.size[0] + 1);
  parallel_for(parallel, p.size[0] * rows, block_rows_worth_a_thread, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t j = 0; j < columns; ++j) active[r * columns + j] = pool<T>(p, r / rows, r % rows, j);
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_reduce_mask_cpu(const sbnet::ReduceMaskParams* params, void* workspace,
                                    const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const ReduceMaskParams& p = *params;
  SBNET_TRY(validate(p));
  uint8_t* active = static_cast<uint8_t*>(workspace);
  by_mask_dtype<Half, BFloat16>(p.mask_dtype, [&](auto t) { pool_all<decltype(t)>(p, active, *parallel); });
  *p.total = list_blocks(active, p.size[0], p.grid.count, p.capacity, p.block_map, p.indices);
  *p.count = static_cast<int32_t>(std::min<int64_t>(*p.total, p.capacity));
  return ok_status();
}
