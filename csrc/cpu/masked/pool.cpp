// sparse_max_pool2d and sparse_avg_pool2d on the CPU: threads take rows of active blocks. The arithmetic is in
// pool_kernel.h.
#include <algorithm>

#include "cpu/lists/fringe.h"
#include "cpu/masked/pool_kernels.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

PoolRowFunction pool_row() {
#if defined(__x86_64__)
  if (chosen_isa() >= Isa::kAvx2) return kPoolRowAvx2;
#endif
  return kPoolRowGeneric;
}

void pool_blocks(const PoolParams& p, const Parallel& parallel) {
  const BlockGrid& grid = p.active.grid;
  const int64_t blocks = std::clamp<int64_t>(*p.active.count, 0, p.active.capacity);
  // A block larger than the plane is the only one of its direction.
  const int64_t height = std::min<int64_t>(grid.size[0], p.y.size[2]);
  const int64_t width = std::min<int64_t>(grid.size[1], p.y.size[3]);
  const int64_t row_taps = width * p.y.size[1] * std::min<int64_t>(int64_t{p.kernel[0]} * p.kernel[1], 65536);
  const PoolRowFunction run = pool_row();
  parallel_for(parallel, blocks * height, 1 + 65536 / row_taps, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t* block = p.active.indices + 3 * (r / height);
      const int64_t n = block[0], i = block[1], j = block[2];
      if (n < 0 || n >= p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
      const int64_t row = i * grid.size[0] + r % height, column = j * grid.size[1];
      if (row < p.y.size[2]) run(p, {n, row, column, std::min(column + width, p.y.size[3])});
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pool2d_cpu(const sbnet::PoolParams* p, const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  if (!p->x.size[0]) return sbnet::ok_status();  // blocks of no image, which a count may claim, have any size
  sbnet::pool_blocks(*p, *parallel);
  sbnet::zero_fringe(p->y, p->fringe, *parallel);
  return sbnet::ok_status();
}
