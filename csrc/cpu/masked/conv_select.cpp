#include "cpu/masked/conv_select.h"

#include <algorithm>
#include <cstdio>

#include "core/masked/conv_select.h"
#include "cpu/masked/conv_run.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

constexpr int64_t kLeastWinogradChannels = 16,
                  kMostWinogradChannels = 512;  // its transforms pay; its inputs fit a cache
constexpr int64_t kLeastAmxChannels = 20;       // about a whole product
constexpr int64_t kLeastInt8AmxChannels = 32;   // half a product

bool few_taps(const TensorView& weight) { return weight.size[2] <= kMaxAxisTaps && weight.size[3] <= kMaxAxisTaps; }

const char* float8_declines(const ConvPlan& plan) {
  return plan.weight.dtype == DType::kF8 ? nullptr : "weights are not float8";
}

const char* int8_matrix_declines(const ConvPlan& plan) {
  const char* why = int8_amx_declines(plan.weight);
  return why ? why : plan.lanewise ? "one input channel a group" : nullptr;
}

const char* int8_declines(const ConvPlan& plan) {
  if (plan.weight.dtype != DType::kI8) return "weights are not int8";
  return plan.lanewise ? "one input channel a group" : nullptr;
}

const char* matrix_declines(const ConvPlan& plan) { return amx_declines(plan.weight); }

const char* winograd_declines(const ConvPlan& plan) {
  if (const char* why = winograd_form_declines(plan.weight, plan.p.groups, plan.tag.shape)) return why;
  if (plan.p.stride[0] != 1 || plan.p.stride[1] != 1) return "stride is not 1";
  // Squares reach beyond small tiles, with dilation far beyond large ones: three quarters of the direct way's products
  // pay.
  const bool pays =
      4 * plan.winograd_products() * plan.squares_of_tile() <= 3 * plan.taps() * plan.tile[0] * plan.tile[1];
  return pays ? nullptr : "squares of four outputs reach too far beyond a tile";
}

const char* lanewise_declines(const ConvPlan& plan) {
  return plan.lanewise ? nullptr : "neither depthwise nor groups narrower than a vector";
}

const char* straight_declines(const ConvPlan& plan, int64_t panel) {
  const Conv2dParams& p = plan.p;
  if (const char* why = lanewise_declines(plan)) return why;
  if (p.x.dtype != DType::kF32 && p.x.dtype != DType::kI8) return "dtype is not float32";
  if (p.x.dtype != plan.weight.dtype) return "the input is rounded as it is read";
  if (p.x.size[1] != plan.weight.size[0]) return "not as many output as input channels";
  if (std::min(plan.width_of_panel(panel), plan.group_out - panel * plan.panel_width) % plan.lanes)
    return "channels are no whole vectors";
  if (p.x.stride[1] != 1 || p.y.stride[1] != 1 || (p.residual.data && p.residual.stride[1] != 1))
    return "a tensor's channels are not adjacent";
  return few_taps(plan.weight) ? nullptr : "more than 8 taps of an axis";
}

const char* lanewise_in_place_declines(const ConvPlan& plan) { return straight_declines(plan, 0); }

const char* narrow_declines(const ConvPlan& plan) {
  if (const char* why = narrow_form_declines(plan.weight, plan.p.groups, plan.tag.shape)) return why;
  return plan.p.x.stride[1] == 1 ? nullptr : "the input's channels are not adjacent";
}

const char* in_place_declines(const ConvPlan& plan) {
  const Conv2dParams& p = plan.p;
  if (plan.taps() != 1) return "kernel is not 1x1";
  if (plan.lanewise) return "one input channel a group";
  if (p.padding[0] || p.padding[1]) return "padding is not 0";
  for (int d = 0; d < 2; ++d)  // a phase of a transposed convolution may reach past its input
    if ((p.y.size[2 + d] - 1) * p.stride[d] >= p.x.size[2 + d]) return "some outputs lie past the input";
  if (p.x.dtype != DType::kF32) return "dtype is not float32";
  return p.x.stride[1] == 1 ? nullptr : "the input's channels are not adjacent";
}

const char* never(const ConvPlan&) { return nullptr; }

}  // namespace

const ConvWayRow kConvWayTable[kConvWays] = {
    {ConvWay::kFloat8, "float8", float8_declines},
    {ConvWay::kInt8Amx, "int8 by AMX", int8_matrix_declines},
    {ConvWay::kInt8, "int8", int8_declines},
    {ConvWay::kAmx, "AMX", matrix_declines},
    {ConvWay::kWinograd, "Winograd F(2x2)", winograd_declines},
    {ConvWay::kLanewiseInPlace, "lanewise", lanewise_in_place_declines},
    {ConvWay::kNarrow, "few outputs", narrow_declines},
    {ConvWay::kInPlace, "1x1 in place", in_place_declines},
    {ConvWay::kLanewise, "lanewise by patches", lanewise_declines},
    {ConvWay::kDirect, "direct", never},
};

const ConvWayRow& select_way(const ConvPlan& plan) {
  const ConvWayRow* row = kConvWayTable;
  while (row->declines(plan)) ++row;
  return *row;
}

const char* amx_declines(const TensorView& weight) {
#if defined(SBNET_AMX)
  const bool half = weight.dtype == DType::kF16;
  if (!half && weight.dtype != DType::kBF16) return "dtype is neither float16 nor bfloat16";
  if (chosen_isa() < (half ? Isa::kAmxFp16 : Isa::kAmx)) return "not this processor";
  return weight.size[1] >= kLeastAmxChannels ? nullptr : "fewer than 20 input channels a group";
#else
  static_cast<void>(weight);
  return "not in this build";
#endif
}

const char* int8_amx_declines(const TensorView& weight) {
#if defined(SBNET_AMX)
  if (weight.dtype != DType::kI8) return "weights are not int8";
  if (chosen_isa() < Isa::kAmx) return "not this processor";
  return weight.size[1] >= kLeastInt8AmxChannels ? nullptr : "fewer than 32 input channels a group";
#else
  static_cast<void>(weight);
  return "not in this build";
#endif
}

const char* winograd_form_declines(const TensorView& weight, int32_t groups, const ConvShape& shape) {
  if (shape.depth != 1) return "dtype is not computed in float32";
  if (groups != 1) return "groups";
  const int64_t side = weight.size[2];
  if (weight.size[3] != side || !winograd_terms(side)) return "kernel is not 2x2, 3x3, 5x5 or 7x7";
  if (weight.size[1] < kLeastWinogradChannels || weight.size[1] > kMostWinogradChannels)
    return "input channels are not 16 to 512";
  return weight.size[0] >= kLeastWinogradChannels ? nullptr : "fewer than 16 output channels";
}

const char* narrow_form_declines(const TensorView& weight, int32_t groups, const ConvShape& shape) {
  if (weight.dtype != DType::kF32) return "dtype is not float32";
  if (groups != 1) return "groups";
  if (2 * weight.size[0] > shape.lanes) return "output channels are more than half a vector";
  if (2 * weight.size[1] < shape.lanes) return "input channels are less than half a vector";
  return few_taps(weight) ? nullptr : "more than 8 taps of an axis";
}

bool runs_straight(const ConvPlan& plan, int64_t panel) { return !straight_declines(plan, panel); }

}  // namespace sbnet

sbnet::Status sbnet_select_conv2d_cpu(const SbnetConvQuery* q, char* text, int64_t room) {
  using namespace sbnet;
  Conv2dParams p = {};
  SBNET_TRY(read_query(*q, &p));
  const ConvPlan plan = make_conv_plan(p, conv_kernels(p.weight).shape, true, 1);
  const ConvWayRow& chosen = select_way(plan);
  int64_t used = snprintf(text, static_cast<size_t>(room), "%s: tiles of %dx%d pixels, panels of %lld channels",
                          chosen.name, plan.tile[0], plan.tile[1], static_cast<long long>(plan.panel_width));
  for (const ConvWayRow* row = kConvWayTable; row != &chosen && used < room; ++row)
    used += snprintf(text + used, static_cast<size_t>(room - used), "\n%s: %s", row->name, row->declines(plan));
  return ok_status();
}
