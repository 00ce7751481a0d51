#include <cfloat>

#include "core/grid.h"
#include "core/layer.h"
#include "core/masked/conv_layers.h"

namespace sbnet {
namespace {
constexpr int64_t kTagBytes = 128, kMostLanes = 16;  // cpu/masked/conv_plan.h, cpu/masked/conv_simd.h
constexpr int64_t kMostIntegerProducts = INT32_MAX / (128 * 128);
constexpr int64_t kMostDepthwiseTaps = (1 << 24) / (128 * 128);  // of int8: CPUs sum them in float32, exactly

// What holds whatever the dtypes are.
Status check_conv(const char* op, const Conv2dParams& p, DType y_dtype, DType residual_dtype) {
  const int64_t N = p.x.size[0], C = p.x.size[1], H = p.x.size[2], W = p.x.size[3];
  const int64_t K = p.weight.size[0];
  SBNET_TRY(check_conv_numbers(op, p));
  for (int d = 0; d < 2; ++d)
    SBNET_CHECK(p.weight.size[2 + d] >= 1 && p.weight.size[2 + d] < (1 << 15),
                "%s: weight: expected kernel sides of 1 to 32767, got %lld", op,
                static_cast<long long>(p.weight.size[2 + d]));
  SBNET_CHECK(C >= 1 && K >= 1 && H >= 1 && W >= 1,
              "%s: x, weight: expected sizes of at least 1, got C %lld, K %lld, plane %lldx%lld", op,
              static_cast<long long>(C), static_cast<long long>(K), static_cast<long long>(H),
              static_cast<long long>(W));
  SBNET_CHECK(C % p.groups == 0 && K % p.groups == 0, "%s: groups: expected a divisor of C = %lld and K = %lld, got %d",
              op, static_cast<long long>(C), static_cast<long long>(K), p.groups);
  SBNET_CHECK(p.weight.size[1] == C / p.groups, "%s: weight: expected C/groups = %lld input channels, got %lld", op,
              static_cast<long long>(C / p.groups), static_cast<long long>(p.weight.size[1]));

  LayerShape shape = {{N, K, 0, 0}, "N, K, H_out, W_out"};
  for (int d = 2; d < 4; ++d) SBNET_TRY(conv_size(op, p, d, p.x.size[d], &shape.size[d]));
  SBNET_TRY(check_layer(op, p.x, p.y, y_dtype, shape, p.active, p.fringe));
  SBNET_CHECK(!N || !p.active.capacity || !may_overlap(p.weight, p.y),
              "%s: out: expected memory of its own, got that of weight", op);
  return p.residual.data ? check_residual(op, p.residual, residual_dtype, p.y) : ok_status();
}

}  // namespace

Status check_conv_numbers(const char* op, const Conv2dParams& p) {
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(p.stride[d] >= 1 && p.dilation[d] >= 1, "%s: stride, dilation: expected at least 1, got %d, %d", op,
                p.stride[d], p.dilation[d]);
    SBNET_CHECK(p.padding[d] >= 0 && p.padding[d] < (1 << 24), "%s: padding: expected 0 to 2^24 - 1, got %d", op,
                p.padding[d]);
    SBNET_CHECK(p.stride[d] < (1 << 15) && p.dilation[d] < (1 << 15),
                "%s: stride, dilation: expected less than 32768, got %d, %d", op, p.stride[d], p.dilation[d]);
  }
  SBNET_CHECK(p.groups >= 1, "%s: groups: expected at least 1, got %d", op, p.groups);
  return ok_status();
}

Status conv_size(const char* op, const Conv2dParams& p, int d, int64_t x, int64_t* y) {
  *y = p.weight.size[0];
  if (d == 1) return ok_status();
  const int64_t reach = x + 2 * int64_t{p.padding[d - 2]} - p.dilation[d - 2] * (p.weight.size[d] - 1) - 1;
  SBNET_CHECK(reach >= 0, "%s: x: expected a side no smaller than the dilated kernel, got %lld with padding %d", op,
              static_cast<long long>(x), p.padding[d - 2]);
  *y = reach / p.stride[d - 2] + 1;
  return ok_status();
}

bool is_depthwise(const TensorView& weight, int32_t groups) { return groups > 1 && weight.size[1] == 1; }

Status validate(const ConvPackParams& p) {
  constexpr const char* op = "pack_conv_weight";
  const int64_t* size = p.weight.size;
  const bool quantized = p.weight.dtype == DType::kI8 || p.weight.dtype == DType::kF8;
  SBNET_CHECK(is_compute_dtype(p.weight.dtype) || quantized,
              "%s: weight: dtype: expected float32, float16, bfloat16, int8 or float8_e4m3fn, got %s", op,
              dtype_name(p.weight.dtype));
  SBNET_CHECK(p.weight.dtype != DType::kF8 || p.groups == 1, "%s: groups: expected 1 with %s weights, got %d", op,
              dtype_name(p.weight.dtype), p.groups);
  SBNET_TRY(check_plane(op, "weight", p.weight));
  double elements = 1;
  for (int d = 0; d < 4; ++d) elements *= static_cast<double>(size[d]);
  SBNET_CHECK(elements >= 1 && elements < 0x1p48, "%s: weight: expected 1 to 2^48 elements, got [%lld,%lld,%lld,%lld]",
              op, static_cast<long long>(size[0]), static_cast<long long>(size[1]), static_cast<long long>(size[2]),
              static_cast<long long>(size[3]));
  SBNET_CHECK(p.groups >= 1 && size[0] % p.groups == 0, "%s: groups: expected a divisor of K = %lld, got %d", op,
              static_cast<long long>(size[0]), p.groups);
  return ok_status();
}

// Instruction sets differ in how far they fill up channels. Whoever widens the elements, to 4 bytes, does not fill up
// input channels; matrix units fill them up, but to no more than twice as many 2-byte elements. Weights of 2x2, 3x3,
// 5x5 and 7x7 may be kept in Winograd's form, too, those of few output channels with input channels as lanes.
int64_t packed_bytes(const ConvPackParams& p) {
  const int64_t* size = p.weight.size;
  if (p.weight.dtype == DType::kF8) return 0;  // widened at each call
  const int64_t groups = size[1] == 1 ? 1 : p.groups,
                lanes = (size[0] / groups + kMostLanes - 1) / kMostLanes * kMostLanes;
  const bool square = size[2] == size[3] && groups == 1;
  const int64_t terms = !square ? 0 : size[2] == 2 ? 3 : size[2] == 3 ? 4 : size[2] == 5 ? 7 : size[2] == 7 ? 10 : 0;
  const bool few = p.groups == 1 && p.weight.dtype == DType::kF32 && 2 * size[0] <= kMostLanes;
  const int64_t by_inputs = few ? size[0] * ((size[1] + kMostLanes - 1) / kMostLanes * kMostLanes) : 0;
  const int64_t taps = size[2] * size[3], sums = p.weight.dtype == DType::kI8 ? groups * lanes * 4 : 0;
  return kTagBytes + (groups * lanes * size[1] * (taps + terms * terms) + by_inputs * taps) * 4 + sums;
}

Status validate(const Conv2dParams& p) {
  constexpr const char* op = "sparse_conv2d";
  SBNET_TRY(check_input(op, p.x));
  SBNET_CHECK(p.weight.dtype == p.x.dtype, "%s: weight: dtype: expected that of x, %s, got %s", op,
              dtype_name(p.x.dtype), dtype_name(p.weight.dtype));
  SBNET_TRY(check_epilogue(op, p.x.dtype, p.bias, p.bias_dtype, p.activation, p.slope, p.slope_dtype));
  return check_conv(op, p, p.x.dtype, p.x.dtype);
}

Status validate(const QuantizedConv2dParams& p) {
  constexpr const char* op = "sparse_conv2d_quantized";
  const DType bytes = p.weight.dtype;
  SBNET_CHECK(bytes == DType::kI8 || bytes == DType::kF8, "%s: weight: dtype: expected int8 or float8_e4m3fn, got %s",
              op, dtype_name(bytes));
  const auto check_dtype = [=](const char* name, const TensorView& t) {
    SBNET_CHECK(t.dtype == bytes || is_compute_dtype(t.dtype),
                "%s: %s: dtype: expected %s, float16, bfloat16 or float32, got %s", op, name, dtype_name(bytes),
                dtype_name(t.dtype));
    return ok_status();
  };
  // Tensors of floats are read and written at their own scale, which is 1.
  const auto check_scale = [=](const char* name, const TensorView& t, float scale, bool wanted) {
    SBNET_CHECK(wanted ? scale > 0 && scale <= FLT_MAX : scale == 0, "%s: %s_scale: expected %s with %s in %s, got %g",
                op, name, wanted ? "a positive number" : "none", name, dtype_name(t.dtype), static_cast<double>(scale));
    return ok_status();
  };
  SBNET_TRY(check_dtype("x", p.x));
  SBNET_TRY(check_scale("x", p.x, p.x_scale, p.x.dtype != bytes));
  SBNET_TRY(check_read(op, p.x));
  SBNET_TRY(check_dtype("out", p.y));
  if (p.residual.data) SBNET_TRY(check_dtype("residual", p.residual));
  SBNET_TRY(check_epilogue(op, DType::kF32, p.bias, p.bias_dtype, p.activation, p.slope, p.slope_dtype));
  SBNET_TRY(check_scale("out", p.y, p.out_scale, p.y.dtype == bytes));
  SBNET_CHECK(bytes != DType::kF8 || p.groups == 1, "%s: groups: expected 1 with %s weights, got %d", op,
              dtype_name(bytes), p.groups);
  SBNET_CHECK(bytes == DType::kF8 ||
                  size_product({p.weight.size[1], p.weight.size[2], p.weight.size[3]}) <= kMostIntegerProducts,
              "%s: weight: expected at most %lld products a sum, which 32 bits hold, got %lldx%lldx%lld", op,
              static_cast<long long>(kMostIntegerProducts), static_cast<long long>(p.weight.size[1]),
              static_cast<long long>(p.weight.size[2]), static_cast<long long>(p.weight.size[3]));
  SBNET_CHECK(bytes == DType::kF8 || !is_depthwise(p.weight, p.groups) ||
                  p.weight.size[2] * p.weight.size[3] <= kMostDepthwiseTaps,
              "%s: weight: expected at most %lld taps of a depthwise layer, got %lldx%lld", op,
              static_cast<long long>(kMostDepthwiseTaps), static_cast<long long>(p.weight.size[2]),
              static_cast<long long>(p.weight.size[3]));
  return check_conv(op, p, p.y.dtype, p.residual.dtype);
}

}  // namespace sbnet
