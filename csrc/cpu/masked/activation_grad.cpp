// sparse_activation_grad on the CPU. The arithmetic of a row is in row_kernel.h.
#include "core/masked/activation_grad.h"

#include <vector>

#include "core/by_dtype.h"
#include "cpu/masked/pixels.h"
#include "cpu/masked/plane_rows.h"
#include "cpu/masked/row_kernels.h"
#include "cpu/simd/half.h"
#include "cpu/simd/isa.h"

sbnet::Status sbnet_sparse_activation_grad_cpu(const sbnet::ActivationGradParams* params,
                                               const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const ActivationGradParams& p = *params;
  SBNET_TRY(validate(p));
  if (!p.y.size[0] || !p.y.size[1]) return ok_status();
  const int64_t C = p.y.size[1];
  std::vector<float> slopes(p.slope ? C : 0);
  if (p.slope)
    by_dtype<Half, BFloat16>(p.slope_dtype, [&](auto t) {
      for (int64_t c = 0; c < C; ++c) slopes[c] = to_float(static_cast<const decltype(t)*>(p.slope)[c]);
    });
  const RowKernels& kernels = SBNET_FROM(Avx2, kRowKernels);
  const auto body = [&](const BlockRow& row) { kernels.activation_grad(p, p.slope ? slopes.data() : nullptr, row); };
  if (p.active.given())
    for_rows(p, 4 * C, *parallel,
             [&](int64_t n, int64_t row, int64_t begin, int64_t end) { body(BlockRow{n, row, begin, end}); });
  else
    write_plane(p.y, p.active, 4 * C, *parallel, body);
  return ok_status();
}

sbnet::Status sbnet_sparse_activation_cpu(const sbnet::ActivationParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const ActivationParams& p = *params;
  SBNET_TRY(validate(p));
  if (!p.y.size[0] || !p.y.size[1]) return ok_status();
  const RowKernels& kernels = SBNET_FROM(Avx2, kRowKernels);
  write_plane<false>(p.y, p.active, 4 * p.y.size[1], *parallel,
                     [&](const BlockRow& row) { kernels.activation(p, row); });
  return ok_status();
}
