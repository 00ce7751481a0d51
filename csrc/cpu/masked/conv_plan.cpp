#include "cpu/masked/conv_plan.h"

#include <algorithm>

#include "cpu/masked/conv_kernels.h"
#include "cpu/masked/conv_select.h"

namespace sbnet {
namespace {

constexpr int64_t kWeightSliceBytes = 20 * 1024;   // about half of L1: a chunk's weights for one panel
constexpr int64_t kIntegerSliceBytes = 48 * 1024;  // read from L2, which products of bytes leave time for
constexpr int64_t kMaxChunk = 64;
constexpr int64_t kMaxProducts = 512;  // per slice and pixel: bounds the chain of float32 roundings
constexpr int64_t kJobChannels = 256;  // output channels per job: bounds the accumulators to 256 KiB
constexpr int32_t kMaxTileWidth = 32;
constexpr int64_t kSharedSlots = 1024;        // patch slots up to which small blocks share a tile
constexpr int32_t kLeastPermutedLanes = 8;    // shorter vectors have no instruction that permutes lanes
constexpr int64_t kWinogradInputs = 1 << 18;  // floats: terms of some channels stay in the second cache

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Of an axis of `extent` outputs: squares begin in every second run of `dilation` neighbours.
int64_t squares_along(int64_t extent, int64_t dilation) {
  return extent / (2 * dilation) * dilation + std::min(extent % (2 * dilation), dilation);
}

}  // namespace

int64_t ConvLayout::width_of_panel(int64_t panel) const { return panel + 1 < panels ? panel_width : last_width; }
int64_t ConvLayout::taps() const { return weight.size[2] * weight.size[3]; }
int64_t ConvLayout::panel_offset(int64_t group, int64_t panel) const {
  const int64_t group_width = (panels - 1) * panel_width + last_width;
  return (group * group_width + panel * panel_width) * stored_in * taps();
}

int64_t ConvLayout::winograd_products() const {
  return winograd_terms(weight.size[2]) * winograd_terms(weight.size[3]);
}
int64_t ConvLayout::winograd_offset(int64_t panel) const {
  return winograd_at + panel * panel_width * winograd_products() * group_in;
}

int64_t ConvPlan::squares_of_tile() const {
  return squares_along(tile[0], p.dilation[0]) * squares_along(tile[1], p.dilation[1]);
}

int32_t pixels_per_run(const ConvPlan& plan, int32_t most) {
  return static_cast<int32_t>(ceil_div(plan.tile[1], ceil_div(plan.tile[1], most)));
}

AxisTaps next_axis_taps(const ConvPlan& plan, int axis, int32_t first) {
  const int64_t stride = plan.p.stride[axis], dilation = plan.p.dilation[axis];
  const int32_t extent = plan.tile[axis], total = static_cast<int32_t>(plan.weight.size[2 + axis]);
  AxisTaps a{};
  a.first = first;
  a.taps = std::min(total - first, kMaxAxisTaps);
  if (dilation == 1 && a.taps >= stride) {
    a.slots = static_cast<int32_t>((extent - 1) * stride + a.taps);
    a.segments = 1;
    a.output_step = stride;
    a.input_step = 1;
    for (int32_t t = 0; t < a.taps; ++t) a.tap_slot[t] = t;
    a.segment[0] = {0, a.slots, first};
    return a;
  }
  a.output_step = 1;
  a.input_step = stride;
  // Inputs of equal remainder modulo the stride form a phase; within a phase neighbours in the patch are one output
  // apart. A tap extends the last segment of its phase unless it lies further away than a whole extent.
  int64_t end[kMaxAxisTaps];  // of each segment, in units of the stride
  for (int32_t t = first; t < first + a.taps; ++t) {
    const int64_t q = t * dilation / stride, phase = t * dilation % stride;
    int s = a.segments - 1;
    while (s >= 0 && a.segment[s].coordinate % stride != phase) --s;
    const bool extends = s >= 0 && q <= end[s];
    const int32_t added = extends ? static_cast<int32_t>(q + extent - end[s]) : extent;
    if (!extends) {
      s = a.segments++;
      a.segment[s] = {0, extent, q * stride + phase};
      end[s] = q + extent;
    } else {
      a.segment[s].count += added;
      end[s] = q + extent;
    }
    a.slots += added;
  }
  for (int s = 1; s < a.segments; ++s) a.segment[s].slot = a.segment[s - 1].slot + a.segment[s - 1].count;
  for (int32_t t = 0; t < a.taps; ++t) {
    const int64_t at = (first + t) * dilation;
    for (int s = 0; s < a.segments; ++s) {
      const int64_t ahead = at - a.segment[s].coordinate;
      if (ahead >= 0 && ahead % stride == 0 && ahead / stride + extent <= a.segment[s].count)
        a.tap_slot[t] = a.segment[s].slot + static_cast<int32_t>(ahead / stride);
    }
  }
  return a;
}

AxisTaps square_axis(const ConvPlan& plan, int axis) {
  const int64_t extent = plan.tile[axis], dilation = plan.p.dilation[axis], rest = (extent - 1) % (2 * dilation);
  const int64_t last = extent - 1 - rest + std::min(rest, dilation - 1);  // where the last square begins
  AxisTaps a{};
  a.taps = static_cast<int32_t>(plan.weight.size[2 + axis]);
  a.slots = static_cast<int32_t>(last + a.taps * dilation + 1);
  a.segments = 1;
  a.output_step = a.input_step = 1;
  a.segment[0] = {0, static_cast<int32_t>(extent + (a.taps - 1) * dilation), 0};
  return a;
}

ConvLayout make_conv_layout(const TensorView& weight, int32_t groups, const ConvShape& shape) {
  ConvLayout l{};
  l.weight = weight;
  l.group_in = weight.size[1];
  const bool shared = shape.depth == 1 && shape.lanes >= kLeastPermutedLanes && l.group_in < shape.lanes &&
                      shape.lanes % l.group_in == 0 && weight.size[0] == groups * l.group_in;
  l.lanewise = groups > 1 && (l.group_in == 1 || shared);
  l.groups = l.lanewise ? 1 : groups;
  l.group_out = weight.size[0] / l.groups;
  l.stored_in = ceil_div(l.group_in, shape.depth) * shape.depth;
  l.lanes = shape.lanes;
  l.panel_width = shape.lanes * shape.vectors;
  l.panels = ceil_div(l.group_out, l.panel_width);
  l.last_width = ceil_div(l.group_out - (l.panels - 1) * l.panel_width, shape.lanes) * shape.lanes;
  l.direct = true;
  l.bytes = aligned(l.panel_offset(l.groups, 0) * shape.element_bytes);
  l.winograd = !winograd_form_declines(weight, groups, shape);
  if (l.winograd) {
    l.winograd_at = l.bytes / shape.element_bytes;
    l.bytes +=
        ((l.panels - 1) * l.panel_width + l.last_width) * l.winograd_products() * l.group_in * shape.element_bytes;
  }

  l.narrow = !narrow_form_declines(weight, groups, shape);
  if (l.narrow) {
    l.narrow_at = l.bytes / shape.element_bytes;
    l.bytes += aligned(l.group_out * l.taps() * ceil_div(l.group_in, shape.lanes) * shape.lanes * shape.element_bytes);
  }

  const bool integers = weight.dtype == DType::kI8 && shape.depth > 1;
  if (integers) {
    l.offsets_at = l.bytes;
    l.bytes += aligned(weight.size[0] * 4);
  }

  const int64_t slice_taps =
      std::min<int64_t>(weight.size[2], kMaxAxisTaps) * std::min<int64_t>(weight.size[3], kMaxAxisTaps);
  const int64_t fits = (integers ? kIntegerSliceBytes : kWeightSliceBytes) /
                       (slice_taps * std::min<int64_t>(l.panel_width, l.group_out) * shape.element_bytes);
  const int64_t most =
      integers ? std::min<int64_t>(fits, kMaxSliceChannels) : std::min({fits, kMaxChunk, kMaxProducts / slice_taps});
  if (shape.depth > 1) {
    const int64_t products = l.stored_in / shape.depth;  // equal chunks of whole products
    l.chunk =
        ceil_div(products, ceil_div(products, std::clamp<int64_t>(most / shape.depth, 1, products))) * shape.depth;
  } else {
    l.chunk = ceil_div(l.group_in, ceil_div(l.group_in, std::clamp<int64_t>(most, 1, l.group_in)));
    if (l.chunk > 4) l.chunk = std::min(l.group_in, ceil_div(l.chunk, 4) * 4);
    if (l.lanewise) l.chunk = l.group_in;
  }
  l.tag = PackTag{{'s', 'b', 'n', 'e', 't', 'w', '3'}, shape, weight.dtype, groups, 0, {}};
  std::copy(weight.size, weight.size + 4, l.tag.size);
  return l;
}

ConvPlan make_conv_plan(const Conv2dParams& p, const ConvShape& shape, bool packed, int32_t threads) {
  ConvPlan plan{};
  static_cast<ConvLayout&>(plan) = make_conv_layout(p.weight, p.groups, shape);
  plan.p = p;
  plan.job_panels = plan.lanewise ? 1 : std::min(plan.panels, std::max<int64_t>(1, kJobChannels / plan.panel_width));

  const int32_t* block = p.active.grid.size;
  const int64_t side[2] = {std::min<int64_t>(block[0], p.y.size[2]), std::min<int64_t>(block[1], p.y.size[3])};
  plan.tiles[1] = ceil_div(side[1], kMaxTileWidth);
  plan.tile[1] = static_cast<int32_t>(ceil_div(side[1], plan.tiles[1]));
  plan.tiles[0] = ceil_div(side[0], kTilePixels / plan.tile[1]);
  plan.tile[0] = static_cast<int32_t>(ceil_div(side[0], plan.tiles[0]));

  int64_t slots[2] = {0, 0};
  for (int axis = 0; axis < 2; ++axis)
    for (int32_t t = 0; t < p.weight.size[2 + axis];) {
      const AxisTaps a = next_axis_taps(plan, axis, t);
      slots[axis] = std::max<int64_t>(slots[axis], a.slots);
      t += a.taps;
    }
  plan.way = select_way(plan).way;
  const bool by_winograd = plan.way == ConvWay::kWinograd;
  if (by_winograd && p.dilation[0] == 1 && plan.tile[0] % 2 && plan.tiles[0] > 1 &&
      (plan.tile[0] + 1) * plan.tile[1] <= kTilePixels) {
    ++plan.tile[0];  // whole squares: a tile's last row would have half ones
    plan.tiles[0] = ceil_div(side[0], plan.tile[0]);
  }
  if (by_winograd)
    for (int axis = 0; axis < 2; ++axis) slots[axis] = square_axis(plan, axis).slots;
  plan.rect_slots = slots[0] * slots[1];
  const int64_t listed = std::min(p.active.capacity, int64_t{kTilePixels}) * plan.tiles[0] * plan.tiles[1];
  plan.rects_per_tile = std::max<int64_t>(
      1, std::min({kTilePixels / int64_t{plan.tile[0] * plan.tile[1]}, kSharedSlots / plan.rect_slots, listed}));

  // The weights of one tap follow each other whatever the chunk, which patches would want small.
  if (plan.way == ConvWay::kInPlace) {
    plan.chunk = ceil_div(plan.group_in, ceil_div(plan.group_in, kMaxSliceChannels));
    plan.rect_slots = 0;
  }
  plan.patch_channels = plan.lanewise ? plan.panel_width : plan.chunk;
  plan.sum_rows = kTileCapacity;
  int64_t inputs = 0;  // floats of transformed inputs
  if (by_winograd) {
    plan.patch_channels = plan.lanes;
    plan.squares = ceil_div(plan.rects_per_tile * plan.squares_of_tile(), kMicroPixels) * kMicroPixels;
    plan.sum_rows = kWinogradPoints * plan.squares;
    const int64_t of_channel = plan.winograd_products() * plan.squares, most = kWinogradInputs / of_channel;
    const int64_t parts = plan.weight.size[2] <= 3 ? 1 : ceil_div(plan.group_in, std::max<int64_t>(most, plan.lanes));
    plan.square_channels = ceil_div(ceil_div(plan.group_in, parts), plan.lanes) * plan.lanes;
    inputs = of_channel * plan.square_channels;
  }
  if (shape.row_pixels) {
    const int64_t run = pixels_per_run(plan, shape.row_pixels);
    plan.sum_rows = plan.rects_per_tile * plan.tile[0] * ceil_div(plan.tile[1], run) * run;
  }

  plan.patch_at = 0;
  // Runs are as long at the end of a row as elsewhere: what they read beyond the patch is not used.
  const int64_t patch_slots = plan.rects_per_tile * plan.rect_slots + shape.row_pixels * p.stride[1];
  plan.inputs_at = aligned(patch_slots * plan.patch_channels * shape.element_bytes);
  plan.sums_at = plan.inputs_at + aligned(inputs * 4);
  // Winograd's way finishes a panel before it begins the next, where it has all inputs.
  const bool one_panel = by_winograd && plan.square_channels >= plan.group_in;
  plan.rects_at = plan.sums_at + (one_panel ? 1 : plan.job_panels) * plan.sum_rows * plan.panel_width * 4;
  plan.pixels_at = aligned(plan.rects_at + plan.rects_per_tile * static_cast<int64_t>(sizeof(ConvRect)));
  plan.scratch_bytes = aligned(plan.pixels_at + static_cast<int64_t>(sizeof(ConvPixels)));
  plan.weights_at = 64;  // after the job counter
  plan.scratch_at = plan.weights_at + (packed ? 0 : plan.bytes);
  plan.total_bytes = plan.scratch_at + std::max(threads, 1) * plan.scratch_bytes;
  return plan;
}

}  // namespace sbnet
