// sparse_max_pool2d and sparse_avg_pool2d on the CPU: threads take rows of active blocks. The arithmetic is in
// pool_kernel.h.
#include "cpu/masked/pixels.h"
#include "cpu/masked/pool_kernels.h"
#include "cpu/simd/isa.h"

sbnet::Status sbnet_sparse_pool2d_cpu(const sbnet::PoolParams* p, const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  if (!p->x.size[0]) return sbnet::ok_status();  // blocks of no image, which a count may claim, have any size
  const int64_t work = p->y.size[1] * std::min<int64_t>(int64_t{p->kernel[0]} * p->kernel[1], 65536);
  const sbnet::PoolRowFunction run = SBNET_FROM(Avx2, kPoolRow);
  sbnet::for_rows(*p, work, *parallel,
                  [&](int64_t n, int64_t row, int64_t begin, int64_t end) { run(*p, {n, row, begin, end}); });
  return sbnet::ok_status();
}
