#include "core/masked/conv_grad.h"

#include "core/grid.h"
#include "core/layer.h"

namespace sbnet {

Status validate(const ConvWeightGradParams& params) {
  constexpr const char* op = "sparse_conv2d_weight_grad";
  const Conv2dParams& p = params.conv;
  SBNET_TRY(check_input(op, p.x));
  const int64_t C = p.x.size[1], K = p.y.size[1];
  SBNET_CHECK(p.groups >= 1 && C % p.groups == 0 && K % p.groups == 0 && C >= 1 && K >= 1,
              "%s: groups: expected a divisor of C = %lld and K = %lld, got %d", op, static_cast<long long>(C),
              static_cast<long long>(K), p.groups);
  LayerShape shape = {{p.x.size[0], K, 0, 0}, "N, K, H_out, W_out"};
  for (int d = 0; d < 2; ++d) {
    const int64_t taps = p.weight.size[2 + d];
    SBNET_CHECK(p.stride[d] >= 1 && p.stride[d] < (1 << 15) && p.dilation[d] >= 1 && p.dilation[d] < (1 << 15),
                "%s: stride, dilation: expected 1 to 32767, got %d, %d", op, p.stride[d], p.dilation[d]);
    SBNET_CHECK(p.padding[d] >= 0 && p.padding[d] < (1 << 24), "%s: padding: expected 0 to 2^24 - 1, got %d", op,
                p.padding[d]);
    SBNET_CHECK(taps >= 1 && taps < (1 << 15), "%s: kernel: expected sides of 1 to 32767, got %lld", op,
                static_cast<long long>(taps));
    const int64_t reach = p.x.size[2 + d] + 2 * int64_t{p.padding[d]} - p.dilation[d] * (taps - 1) - 1;
    SBNET_CHECK(reach >= 0, "%s: x: expected a plane of at least the kernel's reach, got a side of %lld", op,
                static_cast<long long>(p.x.size[2 + d]));
    shape.size[2 + d] = reach / p.stride[d] + 1;
  }
  SBNET_TRY(check_shape(op, "grad", p.y, p.x.dtype, shape));
  SBNET_TRY(check_plane(op, "grad", p.y));
  const int64_t weight[4] = {K, C / p.groups, p.weight.size[2], p.weight.size[3]};
  for (int d = 0; d < 4; ++d)
    SBNET_CHECK(p.weight.size[d] == weight[d] && params.weight.size[d] == weight[d],
                "%s: weight: expected a size of %lld in dimension %d, got %lld", op, static_cast<long long>(weight[d]),
                d, static_cast<long long>(params.weight.size[d]));
  SBNET_CHECK(size_product({weight[1], weight[2], weight[3]}) < INT32_MAX / 4,
              "%s: weight: expected fewer than 2^29 elements per output channel, got more", op);
  SBNET_CHECK(params.weight.dtype == p.x.dtype || params.weight.dtype == DType::kF32,
              "%s: weight: dtype: expected that of x, %s, or float32, got %s", op, dtype_name(p.x.dtype),
              dtype_name(params.weight.dtype));
  SBNET_TRY(check_active(op, p.active));
  return check_tiling(op, p.active.grid, p.y.size[2], p.y.size[3]);
}

Status validate(const ConvWeightGradsParams& p) {
  SBNET_CHECK(p.count <= kMostWeightGrads, "sparse_conv2d_weight_grads: x: expected up to %lld layers, got %lld",
              static_cast<long long>(kMostWeightGrads), static_cast<long long>(p.count));
  for (int64_t k = 0; k < p.count; ++k) SBNET_TRY(validate(p.layers[k]));
  return ok_status();
}

Status validate(const TurnWeightParams& p) {
  constexpr const char* op = "turn_conv_weights";
  SBNET_CHECK(is_compute_dtype(p.weight.dtype), "%s: weight: dtype: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(p.weight.dtype));
  SBNET_CHECK(is_compute_dtype(p.same.dtype), "%s: dtype: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(p.same.dtype));
  SBNET_TRY(check_plane(op, "weight", p.weight));
  const int64_t K = p.weight.size[0], C = p.weight.size[1], R = p.weight.size[2], S = p.weight.size[3];
  SBNET_CHECK(size_product({K, C, R, S}) < INT32_MAX / 2, "%s: weight: expected fewer than 2^30 elements, got more",
              op);
  SBNET_TRY(check_shape(op, "same", p.same, p.same.dtype, {{K, C, R, S}, "that of weight"}));
  return check_shape(op, "turned", p.turned, p.same.dtype, {{C, K, R, S}, "C, K, R, S"});
}

Status validate(const TurnWeightsParams& p) {
  for (int64_t k = 0; k < p.count; ++k) SBNET_TRY(validate(p.weights[k]));
  return ok_status();
}

}  // namespace sbnet
