#include "cpu/weights/conv_winograd.h"

#include <algorithm>
#include <utility>

#include "cpu/masked/conv_run.h"
#include "cpu/weights/arena.h"

namespace sbnet {
namespace {

constexpr int64_t kLeastProducts = 16;  // inputs of an output and outputs of an input, on average: transforms pay

bool are_neighbours(const int32_t* channels, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (channels[i] != channels[0] + i) return false;
  return channels[0] >= 0;
}

int64_t width_of_group(const int32_t* channels) {
  int64_t width = 0;
  while (width < kConvGroup && channels[width] >= 0) ++width;
  return width;
}

// The panels of a side's groups and what they point to.
struct Panels {
  Arena arena;
  int32_t *whole, *count;
  WinogradPanel* panels;
  WinogradRun* runs;
  float* weights;
  int64_t panel_count = 0;

  Panels(const BlocksparseConvParams& p, char* base) : arena{base} {
    const BlocksparseConvSide& side = p.layout.side[p.to()];
    const PanelShape shape = panel_shape();
    int64_t run_count = 0, weight_count = 0;  // of a point
    for_panels(p, shape, [&](int64_t g, int64_t, int64_t channels) {
      ++panel_count;
      run_count += side.start[g + 1] - side.start[g];
      int64_t inputs = 0;
      for (int64_t e = side.start[g]; e < side.start[g + 1]; ++e)
        inputs += conv_block(p.layout, side.block[e]).count[p.from()];
      weight_count += inputs * floats_of(shape, channels);
    });
    whole = arena.take<int32_t>(3 * p.y.size[0]);
    count = arena.take<int32_t>(1);
    panels = arena.take<WinogradPanel>(panel_count);
    runs = arena.take<WinogradRun>(run_count);
    weights = arena.take<float>(weight_count * kWinogradPoints);
  }

  static int64_t floats_of(const PanelShape& shape, int64_t channels) {
    return (channels + shape.lanes - 1) / shape.lanes * shape.lanes;
  }

  // f(group, first of its channels, how many) of every panel.
  template <class F>
  static void for_panels(const BlocksparseConvParams& p, const PanelShape& shape, const F& f) {
    for (int64_t g = 0; g < p.layout.shape.groups[p.to()]; ++g) {
      const int64_t width = width_of_group(p.layout.side[p.to()].channels + g * kConvGroup);
      for (int64_t k = 0; k < width; k += shape.width) f(g, k, std::min<int64_t>(shape.width, width - k));
    }
  }

  void fill(const BlocksparseConvParams& p) const {
    const BlocksparseConvSide& side = p.layout.side[p.to()];
    const PanelShape shape = panel_shape();
    WinogradPanel* panel = panels;
    WinogradRun* run = runs;
    float* at = weights;
    for_panels(p, shape, [&](int64_t g, int64_t k, int64_t channels) {
      *panel = {side.channels[g * kConvGroup] + k, channels, floats_of(shape, channels), run, 0, 0, at};
      for (int64_t e = side.start[g]; e < side.start[g + 1]; ++e, ++run, ++panel->run_count) {
        *run = run_of(p, conv_block(p.layout, side.block[e]), side.position[e * kConvGroup] + k);
        panel->inputs += run->count;
      }
      at += panel->inputs * panel->width * kWinogradPoints;
      ++panel;
    });
    for (int64_t n = 0; n < p.y.size[0]; ++n) {
      whole[3 * n] = static_cast<int32_t>(n);
      whole[3 * n + 1] = whole[3 * n + 2] = 0;
    }
    *count = static_cast<int32_t>(p.y.size[0]);
  }

  // Of a block's output channels from the `first` on.
  static WinogradRun run_of(const BlocksparseConvParams& p, const BlocksparseConvBlock& block, int64_t first) {
    const int64_t inner = block.count[1];  // filters are [outputs, inputs, taps] of the forward convolution
    WinogradRun run = {block.list[p.from()][0], block.count[p.from()], nullptr, {inner * 9, 9, 3, 1}};
    int64_t at = block.weight;
    if (p.transposed) {
      std::swap(run.stride[0], run.stride[1]);
      run.stride[2] = -3, run.stride[3] = -1;
      at += 8;
    }
    at += first * run.stride[0];
    run.filters = static_cast<const char*>(p.weight) + at * dtype_size(p.x.dtype);
    return run;
  }
};

}  // namespace

bool suits_winograd(const BlocksparseConvParams& p) {
  const ConvGeometry& g = p.geometry;
  for (int d = 0; d < 3; ++d)
    if (g.kernel[d] != (d ? 3 : 1) || g.stride[d] != 1 || g.dilation[d] != 1) return false;
  if (g.padding[0] || p.x.size[2] != 1 || p.y.size[2] != 1) return false;
  if (!p.y.size[0] || !p.y.size[3] || !p.y.size[4] || !suits_panels(conv_of_planes(p))) return false;
  const BlocksparseConvSide& side = p.layout.side[p.to()];
  int64_t products = 0;
  for (int64_t i = 0; i < p.layout.shape.groups[p.to()]; ++i) {
    const int32_t* channels = side.channels + i * kConvGroup;
    const int64_t width = width_of_group(channels);
    if (!are_neighbours(channels, width)) return false;
    for (int64_t e = side.start[i]; e < side.start[i + 1]; ++e) {
      const BlocksparseConvBlock block = conv_block(p.layout, side.block[e]);
      if (!are_neighbours(side.position + e * kConvGroup, width)) return false;
      if (!are_neighbours(block.list[p.from()], block.count[p.from()])) return false;
      products += width * block.count[p.from()];
    }
  }
  return products >= kLeastProducts * std::max(p.layout.shape.channels[0], p.layout.shape.channels[1]);
}

int64_t winograd_workspace_bytes(const BlocksparseConvParams& p, int32_t threads) {
  const Panels panels(p, nullptr);
  return panels.arena.used + panel_conv_workspace_bytes(conv_of_planes(p), panels.panel_count, threads);
}

void convolve_by_winograd(const BlocksparseConvParams& p, char* workspace, const Parallel& parallel) {
  const Panels panels(p, workspace);
  panels.fill(p);
  Conv2dParams c = conv_of_planes(p);
  if (!p.active.given()) c.active.indices = panels.whole, c.active.count = panels.count;
  run_panel_conv(c, panels.panels, panels.panel_count, workspace + panels.arena.used, parallel);
}

}  // namespace sbnet
