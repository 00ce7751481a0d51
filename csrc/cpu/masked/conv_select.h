// Which of the CPU's kernels computes a convolution, and why none before it does: the one table that the plan, and so
// every call, `pack_conv_weight` and `sbnet info --layer` ask.
#pragma once
#include "cpu/masked/conv_plan.h"

namespace sbnet {

struct ConvWayRow {
  ConvWay way;
  const char* name;
  const char* (*declines)(const ConvPlan& plan);  // why it does not take the plan, which has its tile; null: it does
};

// First match wins; the last row accepts everything.
constexpr int kConvWays = 10;  // from kWinograd on in the order of ConvWay
extern const ConvWayRow kConvWayTable[kConvWays];

const ConvWayRow& select_way(const ConvPlan& plan);

// What the weights alone decide, before planes and blocks are known: why matrix units do not take them, why they are
// not kept in Winograd's form, and not in that of few output channels.
const char* amx_declines(const TensorView& weight);
const char* int8_amx_declines(const TensorView& weight);
const char* winograd_form_declines(const TensorView& weight, int32_t groups, const ConvShape& shape);
const char* narrow_form_declines(const TensorView& weight, int32_t groups, const ConvShape& shape);

}  // namespace sbnet
