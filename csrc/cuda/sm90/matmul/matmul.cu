// Which Hopper kernel serves a product with block-sparse weights.
#include "cuda/sm90/matmul/launch.cuh"
#include "cuda/sm90/matmul/matmul.h"

namespace sbnet::sm90 {
namespace {

using namespace matmul;

bool is_half(DType t) { return t == DType::kF16 || t == DType::kBF16; }
bool has_plan(const int32_t* plan, int64_t words) { return plan && words > 0 && words <= INT32_MAX; }
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Costs in clocks of an SM: a record of a wide tile (by its loads, 48 KB at 37 bytes a clock), of half a one, of a
// narrow tile.
constexpr double kWideRecord = 1330, kHalfRecord = 900, kNarrowRecord = 440;

// A table, first match wins:
//   active blocks                   quad
//   rows <= 64                      narrow: the weights are read once
//   few tiles, less time by records narrow
//   the rest                        wide
bool narrow_serves(const BlocksparseMatmulParams& p, int sm_count) {
  const int64_t rows = rows_of(p.x);
  if (rows <= 64) return true;
  const TilePlan wide = wide_plan(p.layout.shape, p.transposed), narrow = narrow_plan(p.layout.shape, p.transposed);
  const double workers = sm_count / wide.cluster, items = wide.groups * ((rows + 255) / 256);
  const double whole = static_cast<int64_t>(items / workers), rest = items - whole * workers;
  const double wide_time = whole * kWideRecord + (rest == 0                            ? 0
                                                  : 2 * rest <= workers || rows <= 128 ? kHalfRecord
                                                                                       : kWideRecord);
  const int64_t narrow_items = narrow.groups * ((rows + 63) / 64);
  const double rounds = static_cast<double>((narrow_items + sm_count - 1) / sm_count);
  return rounds * kNarrowRecord / (1 << narrow_log_cluster(p, sm_count)) < wide_time;
}

}  // namespace

bool blocksparse_matmul_takes(const BlocksparseMatmulParams& p) {
  Matrix x, y;
  const BlockLayoutShape& s = p.layout.shape;
  const int64_t size = s.block_size;
  if (!is_half(p.x.dtype) || !has_plan(p.plan, p.plan_words) || size < 16 || !s.blocks || !aligned(p.weight))
    return false;
  if (p.active.given()) {
    if (!tma_reads(p.x) || !tma_reads(p.y) || !quad_box_rows(p.active.grid, 64) ||
        row_capacity(p.x, p.active) > (1 << 30))
      return false;
  } else if (!matrix_of(p.x, &x) || !matrix_of(p.y, &y)) {
    return false;
  }
  const TilePlan wide = wide_plan(s, p.transposed), narrow = narrow_plan(s, p.transposed);
  const int64_t tiles = row_capacity(p.x, p.active) / 16 + 1;
  return s.blocks * size * size / 64 < INT32_MAX && s.blocks <= (1 << 28) && narrow.groups * tiles < (1 << 30) &&
         narrow.table + kGroupWords * (narrow.groups + 1) <= p.plan_words && wide.groups > 0;
}

bool blocksparse_weight_grad_takes(const BlocksparseWeightGradParams& p) {
  const BlockLayoutShape& s = p.layout.shape;
  if (!is_half(p.x[0].dtype) || p.active.given() || !has_plan(p.plan, p.plan_words) || s.block_size < 16 || !s.blocks)
    return false;
  if (!aligned(p.dw) || s.blocks > (1 << 28)) return false;
  int64_t rows = 0;
  for (int i = 0; i < p.pairs; ++i) {
    Matrix x, dy;
    if (!matrix_of(p.x[i], &x) || !matrix_of(p.dy[i], &dy)) return false;
    rows += x.rows + 64;
  }
  return rows < INT32_MAX;
}

int64_t blocksparse_matmul_workspace_bytes(const BlocksparseMatmulParams&, const DeviceInfo&) { return 0; }
int64_t blocksparse_weight_grad_workspace_bytes(const BlocksparseWeightGradParams&, const DeviceInfo&) { return 0; }

Status blocksparse_matmul(const BlocksparseMatmulParams& p, const DeviceInfo& device, void*, cudaStream_t stream) {
  if (p.active.given()) return launch_quad(p, device, stream);
  return narrow_serves(p, device.sm_count) ? launch_narrow(p, device, stream) : launch_wide(p, device, stream);
}

Status blocksparse_weight_grad(const BlocksparseWeightGradParams& p, const DeviceInfo& device, void*,
                               cudaStream_t stream) {
  return launch_weight_grad(p, device, stream);
}

}  // namespace sbnet::sm90
