#include <numeric>

#include "core/grid.h"
#include "core/masked/conv_layers.h"

namespace sbnet {
namespace {
constexpr const char* kOp = ConvTransposeLayer::kName;
}

Status ConvTransposeLayer::check(const ConvTransposeParams& p) {
  constexpr int32_t kMost = 1 << 15;
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(p.stride[d] >= 1 && p.dilation[d] >= 1 && p.stride[d] < kMost && p.dilation[d] < kMost,
                "%s: stride, dilation: expected 1 to 32767, got %d, %d", kOp, p.stride[d], p.dilation[d]);
    SBNET_CHECK(p.padding[d] >= 0 && p.padding[d] < (1 << 24), "%s: padding: expected 0 to 2^24, got %d", kOp,
                p.padding[d]);
    SBNET_CHECK(p.output_padding[d] >= 0 && (p.output_padding[d] < p.stride[d] || p.output_padding[d] < p.dilation[d]),
                "%s: output_padding: expected less than stride or dilation, %d, %d, got %d", kOp, p.stride[d],
                p.dilation[d], p.output_padding[d]);
  }
  SBNET_CHECK(p.groups >= 1, "%s: groups: expected at least 1, got %d", kOp, p.groups);
  return ok_status();
}

Status ConvTransposeLayer::size(const ConvTransposeParams& p, int d, int64_t x, int64_t* y) {
  *y = size_product({p.weight.size[1], p.groups});
  if (d == 1) return ok_status();
  const int64_t taps = p.weight.size[d];
  SBNET_CHECK(taps >= 1 && taps < (1 << 15), "%s: weight: expected kernel sides of 1 to 32767, got %lld", kOp,
              static_cast<long long>(taps));
  *y = (x - 1) * p.stride[d - 2] - 2 * int64_t{p.padding[d - 2]} + p.dilation[d - 2] * (taps - 1) +
       p.output_padding[d - 2] + 1;
  SBNET_CHECK(x >= 1 && *y >= 1 && *y <= (1 << 29),
              "%s: x: expected a plane that gives one of 1 to 2^29 pixels a side, got side %lld, which gives %lld", kOp,
              static_cast<long long>(x), static_cast<long long>(*y));
  return ok_status();
}

Status validate(const ConvTransposeParams& p) {
  const int64_t C = p.x.size[1];
  SBNET_TRY(check_input(kOp, p.x));
  SBNET_CHECK(p.weight.dtype == p.x.dtype, "%s: weight: dtype: expected that of x, %s, got %s", kOp,
              dtype_name(p.x.dtype), dtype_name(p.weight.dtype));
  SBNET_TRY(check_plane(kOp, "weight", p.weight));
  SBNET_TRY(ConvTransposeLayer::check(p));
  SBNET_CHECK(p.weight.size[0] == C && C >= 1, "%s: weight: expected the %lld channels of x first, got %lld", kOp,
              static_cast<long long>(C), static_cast<long long>(p.weight.size[0]));
  SBNET_CHECK(C % p.groups == 0, "%s: groups: expected a divisor of the %lld channels, got %d", kOp,
              static_cast<long long>(C), p.groups);
  const int64_t K = p.weight.size[1] * p.groups;
  SBNET_CHECK(K >= 1 && K <= INT32_MAX / 2, "%s: weight: expected 1 to 2^30 output channels, got %lld", kOp,
              static_cast<long long>(K));
  SBNET_CHECK(size_product({C, p.weight.size[1], p.weight.size[2], p.weight.size[3]}) < int64_t{1} << 48,
              "%s: weight: expected less than 2^48 elements", kOp);
  SBNET_TRY(check_epilogue(kOp, p.x.dtype, p.bias, p.bias_dtype, p.activation, p.slope, p.slope_dtype));
  LayerShape shape = {{p.x.size[0], K, 0, 0}, "N, K, H_out, W_out"};
  for (int d = 2; d < 4; ++d) SBNET_TRY(ConvTransposeLayer::size(p, d, p.x.size[d], &shape.size[d]));
  SBNET_TRY(check_layer(kOp, p.x, p.y, shape, p.active, p.fringe));
  SBNET_CHECK(!p.x.size[0] || !p.active.capacity || !may_overlap(p.weight, p.y),
              "%s: out: expected memory of its own, got that of weight", kOp);
  return p.residual.data ? check_residual(kOp, p.residual, p.y) : ok_status();
}

TransposePhase transpose_phase(const ConvTransposeParams& p, int d, int32_t phase) {
  const int32_t stride = p.stride[d], dilation = p.dilation[d], common = std::gcd(stride, dilation);
  const int64_t kernel = p.weight.size[2 + d], out = p.y.size[2 + d];
  TransposePhase found = {0, 0, stride / common, 0, dilation / common, 0};
  if (phase < out) found.side = (out - phase + stride - 1) / stride;
  int64_t tap = 0;
  while (tap < found.tap_step && (phase + p.padding[d] - tap * dilation) % stride) ++tap;
  if (tap >= found.tap_step || tap >= kernel) return found;
  found.taps = static_cast<int32_t>((kernel - 1 - tap) / found.tap_step + 1);
  found.last_tap = static_cast<int32_t>(tap + int64_t{found.taps - 1} * found.tap_step);
  found.first = static_cast<int32_t>((phase + p.padding[d] - int64_t{found.last_tap} * dilation) / stride);
  return found;
}

bool runs_by_phases(const ConvTransposeParams& p) {
  for (int d = 0; d < 2; ++d) {
    if (p.stride[d] > kMaxTransposeStride || p.active.grid.size[d] % p.stride[d]) return false;
    for (int32_t phase = 0; phase < p.stride[d]; ++phase) {
      const TransposePhase found = transpose_phase(p, d, phase);
      if (found.side && (!found.taps || found.first >= p.x.size[2 + d])) return false;
    }
  }
  return true;
}

int64_t transpose_weights(const ConvTransposeParams& p) {
  return p.weight.size[0] * p.weight.size[1] * p.weight.size[2] * p.weight.size[3];
}

Conv2dParams phase_conv(const ConvTransposeParams& p, const TransposePhase& row, const TransposePhase& column,
                        int32_t row_phase, int32_t column_phase, void* weights) {
  Conv2dParams c = {};
  const TransposePhase* axes[2] = {&row, &column};
  const int32_t phases[2] = {row_phase, column_phase};
  const int64_t K = p.y.size[1], channels = p.x.size[1] / p.groups, R = row.taps, S = column.taps;
  c.x = p.x, c.y = p.y, c.residual = p.residual;
  c.weight = {weights, {K, channels, R, S}, {R * S * channels, 1, S * channels, channels}, p.x.dtype};
  c.bias = p.bias, c.bias_dtype = p.bias_dtype;
  c.active = p.active;
  c.groups = p.groups;
  c.activation = p.activation, c.activation_param = p.activation_param;
  c.slope = p.slope, c.slope_dtype = p.slope_dtype;
  c.allow_tf32 = p.allow_tf32;
  const int64_t item = dtype_size(p.x.dtype);
  for (int d = 0; d < 2; ++d) {
    const int e = 2 + d;
    const int64_t skipped = axes[d]->first > 0 ? axes[d]->first : 0;  // rows of x before the first that is read
    c.x.data = static_cast<char*>(c.x.data) + skipped * c.x.stride[e] * item;
    c.x.size[e] -= skipped;
    for (TensorView* t : {&c.y, &c.residual}) {
      if (!t->data) continue;
      t->data = static_cast<char*>(t->data) + phases[d] * t->stride[e] * item;
      t->size[e] = axes[d]->side;
      t->stride[e] *= p.stride[d];
    }
    c.stride[d] = 1;
    c.padding[d] = axes[d]->first < 0 ? -axes[d]->first : 0;
    c.dilation[d] = axes[d]->taps > 1 ? axes[d]->dilation : 1;
    BlockGrid& grid = c.active.grid;
    grid.size[d] = grid.stride[d] = p.active.grid.size[d] / p.stride[d];
    grid.count[d] = static_cast<int32_t>((axes[d]->side + grid.size[d] - 1) / grid.size[d]);
  }
  return c;
}

}  // namespace sbnet
