#include "core/masked/pool.h"

namespace sbnet {

Status PoolLayer::check(const PoolParams& p) {
  const char* op = pool_name(p.kind);
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(p.kernel[d] >= 1 && p.stride[d] >= 1 && p.dilation[d] >= 1,
                "%s: kernel_size, stride, dilation: expected at least 1, got %d, %d, %d", op, p.kernel[d], p.stride[d],
                p.dilation[d]);
    const int64_t reach = int64_t{p.dilation[d]} * (p.kernel[d] - 1) + 1;
    SBNET_CHECK(reach < (1 << 28) && p.stride[d] < (1 << 28),
                "%s: kernel_size, stride, dilation: expected a reach and a stride of less than 2^28, got %d, %d, %d",
                op, p.kernel[d], p.stride[d], p.dilation[d]);
    SBNET_CHECK(p.padding[d] >= 0 && p.padding[d] <= p.kernel[d] / 2,
                "%s: padding: expected 0 to half of kernel_size, %d, got %d", op, p.kernel[d] / 2, p.padding[d]);
    SBNET_CHECK(p.kind == PoolKind::kMax || p.dilation[d] == 1, "%s: dilation: expected 1, got %d", op, p.dilation[d]);
  }
  return ok_status();
}

Status PoolLayer::size(const PoolParams& p, int d, int64_t x, int64_t* y) {
  *y = x;
  if (d == 1) return ok_status();
  const int32_t kernel = p.kernel[d - 2], stride = p.stride[d - 2], padding = p.padding[d - 2];
  const int64_t reach = x + 2 * int64_t{padding} - int64_t{p.dilation[d - 2]} * (kernel - 1) - 1;
  const int64_t rounded = reach + (p.ceil_mode ? stride - 1 : 0);
  *y = rounded < 0 ? 0 : rounded / stride + 1;
  if (p.ceil_mode && (*y - 1) * stride >= x + padding) --*y;  // a window in the far padding alone is none
  SBNET_CHECK(*y >= 1, "%s: x: expected at least the kernel's reach, got side %lld with padding %d", pool_name(p.kind),
              static_cast<long long>(x), padding);
  return ok_status();
}

Status validate(const PoolParams& p) {
  return p.kind == PoolKind::kMax ? check_plain<MaxPoolLayer>(p) : check_plain<AveragePoolLayer>(p);
}

}  // namespace sbnet
