#include "core/masked/pool.h"

#include "core/layer.h"

namespace sbnet {

int64_t pool_output_side(int64_t side, int32_t kernel, int32_t stride, int32_t padding, int32_t dilation,
                         bool ceil_mode) {
  const int64_t reach = side + 2 * int64_t{padding} - int64_t{dilation} * (kernel - 1) - 1;
  const int64_t rounded = reach + (ceil_mode ? stride - 1 : 0);
  int64_t out = rounded < 0 ? 0 : rounded / stride + 1;
  if (ceil_mode && (out - 1) * stride >= side + padding) --out;  // a window in the far padding alone is none
  return out;
}

Status check_pool_window(const PoolParams& p) {
  const char* op = pool_name(p.kind);
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(p.kernel[d] >= 1 && p.stride[d] >= 1 && p.dilation[d] >= 1,
                "%s: kernel_size, stride, dilation: %d, %d, %d; at least 1 is wanted", op, p.kernel[d], p.stride[d],
                p.dilation[d]);
    const int64_t reach = int64_t{p.dilation[d]} * (p.kernel[d] - 1) + 1;
    SBNET_CHECK(reach < (1 << 28) && p.stride[d] < (1 << 28),
                "%s: kernel_size, stride, dilation: %d, %d, %d; a reach and a stride of less than 2^28 are wanted", op,
                p.kernel[d], p.stride[d], p.dilation[d]);
    SBNET_CHECK(p.padding[d] >= 0 && p.padding[d] <= p.kernel[d] / 2,
                "%s: padding: %d; 0 to half of kernel_size, %d, is wanted", op, p.padding[d], p.kernel[d] / 2);
  }
  return ok_status();
}

Status validate(const PoolParams& p) {
  const char* op = pool_name(p.kind);
  SBNET_TRY(check_input(op, p.x));
  SBNET_TRY(check_pool_window(p));
  SBNET_CHECK(p.kind == PoolKind::kMax || (p.dilation[0] == 1 && p.dilation[1] == 1),
              "%s: dilation: %d, %d; 1 is wanted", op, p.dilation[0], p.dilation[1]);
  LayerShape out = {{p.x.size[0], p.x.size[1], 0, 0}, "N, C, H_out, W_out"};
  for (int d = 0; d < 2; ++d) {
    out.size[2 + d] =
        pool_output_side(p.x.size[2 + d], p.kernel[d], p.stride[d], p.padding[d], p.dilation[d], p.ceil_mode);
    SBNET_CHECK(out.size[2 + d] >= 1, "%s: x: plane %lldx%lld is smaller than the kernel's reach", op,
                static_cast<long long>(p.x.size[2]), static_cast<long long>(p.x.size[3]));
  }
  return check_layer(op, p.x, p.y, out, p.active, p.fringe);
}

}  // namespace sbnet
