// sparse_pointwise on the CPU: threads take rows of active blocks. What a row takes is in pointwise_kernel.h.
#include "core/masked/pointwise.h"

#include "cpu/masked/pixels.h"
#include "cpu/masked/pointwise_kernels.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

// A program without steps, of channels that lie next to each other.
void copy_row(const PointwiseParams& p, const BlockRow& row) {
  const int64_t item = dtype_size(p.x.dtype);
  const auto at = [&](const TensorView& t, int64_t w) {
    return static_cast<char*>(t.data) + (row.n * t.stride[0] + row.row * t.stride[2] + w * t.stride[3]) * item;
  };
  for (int64_t w = row.column; w < row.column_end; ++w)
    std::memcpy(at(p.y, w), at(p.x, w), static_cast<size_t>(p.y.size[1] * item));
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pointwise_cpu(const sbnet::PointwiseParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const PointwiseParams& p = *params;
  SBNET_TRY(validate(p));
  if (!p.x.size[0]) return ok_status();
  const bool copies = !p.steps && p.x.stride[1] == 1 && p.y.stride[1] == 1;
  const PointwiseRowFunction run = copies ? copy_row : SBNET_FROM(Avx2, kPointwiseRow);
  for_rows(p, p.y.size[1] * (1 + p.steps), *parallel,
           [&](int64_t n, int64_t row, int64_t begin, int64_t end) { run(p, {n, row, begin, end}); });
  return ok_status();
}
