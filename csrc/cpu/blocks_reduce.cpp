// reduce_mask on the CPU: one byte a block in parallel, then one pass that numbers the active ones.
#include "core/blocks.h"
#include "cpu/mask.h"

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

template <class T>
bool pool(const ReduceMaskParams& p, int64_t n, int64_t i, int64_t j) {
  const BlockGrid& g = p.grid;
  const int64_t y_start = g.offset[0] + i * g.stride[0], x_start = g.offset[1] + j * g.stride[1];
  const int64_t y0 = y_start < 0 ? 0 : y_start, x0 = x_start < 0 ? 0 : x_start;
  const int64_t y1 = y_start + g.size[0] < p.size[1] ? y_start + g.size[0] : p.size[1];
  const int64_t x1 = x_start + g.size[1] < p.size[2] ? x_start + g.size[1] : p.size[2];
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
  return p.avgpool &&
         static_cast<float>(sum / (static_cast<double>(g.size[0]) * g.size[1])) > static_cast<float>(p.tol);
}

template <class T>
void pool_all(const ReduceMaskParams& p, uint8_t* active, const Parallel& parallel) {
  const int64_t rows = p.grid.count[0], columns = p.grid.count[1];
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
  switch (p.mask_dtype) {
    case DType::kF16:
      pool_all<Half>(p, active, *parallel);
      break;
    case DType::kBF16:
      pool_all<BFloat16>(p, active, *parallel);
      break;
    case DType::kF32:
      pool_all<float>(p, active, *parallel);
      break;
    case DType::kF64:
      pool_all<double>(p, active, *parallel);
      break;
    default:
      pool_all<uint8_t>(p, active, *parallel);
      break;
  }
  int64_t total = 0, b = 0;
  for (int32_t n = 0; n < p.size[0]; ++n) {
    for (int32_t i = 0; i < p.grid.count[0]; ++i) {
      for (int32_t j = 0; j < p.grid.count[1]; ++j, ++b) {
        const bool listed = active[b] && total < p.capacity;
        p.block_map[b] = listed ? static_cast<int32_t>(total) : -1;
        if (listed) {
          int32_t* row = p.indices + total * 3;
          row[0] = n, row[1] = i, row[2] = j;
        }
        total += active[b];
      }
    }
  }
  *p.total = static_cast<int32_t>(total);
  *p.count = static_cast<int32_t>(total < p.capacity ? total : p.capacity);
  for (int64_t r = int64_t{*p.count} * 3; r < p.capacity * 3; ++r) p.indices[r] = -1;
  return ok_status();
}
