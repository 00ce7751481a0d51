#include "core/masked/pool.h"

#include "core/grid.h"

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
  const int64_t N = p.x.size[0], C = p.x.size[1], H = p.x.size[2], W = p.x.size[3];
  SBNET_CHECK(is_compute_dtype(p.x.dtype), "%s: x: dtype %s; float32, float16 or bfloat16 is wanted", op,
              dtype_name(p.x.dtype));
  SBNET_TRY(check_pool_window(p));
  SBNET_CHECK(p.kind == PoolKind::kMax || (p.dilation[0] == 1 && p.dilation[1] == 1),
              "%s: dilation: %d, %d; 1 is wanted", op, p.dilation[0], p.dilation[1]);
  SBNET_CHECK(C >= 1 && H >= 1 && W >= 1, "%s: x: C %lld, plane %lldx%lld; none may be 0", op,
              static_cast<long long>(C), static_cast<long long>(H), static_cast<long long>(W));
  SBNET_TRY(check_plane(op, "x", p.x));
  SBNET_TRY(check_plane(op, "out", p.y));
  int64_t out[4] = {N, C, 0, 0};
  for (int d = 0; d < 2; ++d) {
    out[2 + d] = pool_output_side(p.x.size[2 + d], p.kernel[d], p.stride[d], p.padding[d], p.dilation[d], p.ceil_mode);
    SBNET_CHECK(out[2 + d] >= 1, "%s: x: plane %lldx%lld is smaller than the kernel's reach", op,
                static_cast<long long>(H), static_cast<long long>(W));
  }
  SBNET_CHECK(p.y.dtype == p.x.dtype, "%s: out: dtype %s; the dtype of x, %s, is wanted", op, dtype_name(p.y.dtype),
              dtype_name(p.x.dtype));
  for (int d = 0; d < 4; ++d) {
    SBNET_CHECK(p.y.size[d] == out[d],
                "%s: out: shape [%lld,%lld,%lld,%lld]; [%lld,%lld,%lld,%lld] (N, C, H_out, W_out) is wanted", op,
                static_cast<long long>(p.y.size[0]), static_cast<long long>(p.y.size[1]),
                static_cast<long long>(p.y.size[2]), static_cast<long long>(p.y.size[3]),
                static_cast<long long>(out[0]), static_cast<long long>(out[1]), static_cast<long long>(out[2]),
                static_cast<long long>(out[3]));
    SBNET_CHECK(p.y.stride[d] > 0 || p.y.size[d] <= 1,
                "%s: out: an expanded tensor (stride 0 in dimension %d); a tensor of its own memory is wanted", op, d);
  }
  SBNET_CHECK(!N || !p.active.capacity || !may_overlap(p.x, p.y),
              "%s: out: shares memory with x; a separate tensor is wanted", op);
  SBNET_TRY(check_active(op, p.active));
  SBNET_TRY(check_tiling(op, p.active.grid, out[2], out[3]));
  if (p.fringe.pixels)
    SBNET_CHECK(p.fringe.count && p.fringe.capacity >= 0 && size_product({N, out[2], out[3]}) <= INT32_MAX,
                "%s: fringe: needs a count and a plane of less than 2^31 pixels", op);
  return ok_status();
}

}  // namespace sbnet
