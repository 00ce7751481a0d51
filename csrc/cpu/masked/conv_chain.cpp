// Chains of convolutions on the CPU, tile by tile of the depthwise one's output. Each tile's hidden pixels lie in the
// thread's scratch, which the layers' kernels see as planes of which it is a window. What tiles have in common, the
// pixels around them, is computed twice: there are few, and the same kernel gives them the same bits.
#include "core/masked/conv_chain.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/grid.h"
#include "cpu/lists/fringe.h"
#include "cpu/masked/conv_kernels.h"
#include "cpu/masked/conv_run.h"

namespace sbnet {
namespace {

constexpr int64_t kTileBytes = 640 * 1024;                                // hidden pixels of a tile: most of L2
constexpr int64_t kLeastBytes = 4 << 20;                                  // hidden pixels of all blocks: as layers
constexpr int32_t kLeastSide = 8;                                         // of a block: smaller ones are mostly rim
constexpr int32_t kWholeJob = kTilePixels / kMicroPixels * kMicroPixels;  // no microtile with copies

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows or columns [begin, end) of a plane.
struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

struct Chain {
  const ConvChainParams* p;
  int32_t middle;  // the depthwise layer
  ConvPlan plans[kMostChained];
  int64_t hidden;     // channels
  int64_t pixels[2];  // of a tile's first and second hidden map, at most; 0 without one
  int64_t map_bytes;
  int64_t rects_at, hidden_at[2], scratch_bytes, scratch_at, total_bytes;  // of a thread's scratch; of the workspace

  bool widens() const { return middle > 0; }
  bool narrows() const { return middle + 1 < p->count; }
  const ConvPlan& depthwise() const { return plans[middle]; }
};

// Input rows (axis 0) or columns of `extent` outputs from `first` on, within the plane.
Range inputs_of(const Conv2dParams& p, int axis, int64_t first, int64_t extent) {
  const int64_t begin = first * p.stride[axis] - p.padding[axis];
  const int64_t end = begin + (extent - 1) * p.stride[axis] + (p.weight.size[2 + axis] - 1) * p.dilation[axis] + 1;
  const int64_t side = p.x.size[2 + axis], from = std::clamp<int64_t>(begin, 0, side);
  return {from, std::clamp(end, from, side)};
}

// Sees `memory`, of whole pixels, as the part of t's plane that begins at (row, column): of whatever image.
void see(TensorView* t, const void* memory, int64_t row, int64_t column, int64_t width) {
  const int64_t C = t->size[1];
  t->stride[0] = 0, t->stride[1] = 1, t->stride[2] = width * C, t->stride[3] = C;
  const int64_t before = (row * width + column) * C * static_cast<int64_t>(sizeof(float));
  t->data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) - static_cast<uintptr_t>(before));
}

bool is_plain(const ConvPlan& plan) {
  const Conv2dParams& p = plan.p;
  return plan.way == ConvWay::kInPlace && plan.groups == 1 && p.stride[0] == 1 && p.stride[1] == 1 &&
         p.y.stride[1] == 1;
}

int32_t middle_of(const ConvChainParams& p) {
  int32_t middle = 0;
  while (middle < p.count && p.layers[middle].groups == 1) ++middle;
  return middle;
}

Chain make_chain(const ConvChainParams& p, int32_t threads) {
  Chain c{};
  c.p = &p;
  c.middle = middle_of(p);
  const Conv2dParams& depthwise = p.layers[c.middle];
  c.hidden = depthwise.y.size[1];
  int64_t conv_bytes = 0;
  for (int32_t k = 0; k < p.count; ++k) {
    Conv2dParams layer = p.layers[k];
    if (k > 0) see(&layer.x, nullptr, 0, 0, layer.x.size[3]);
    if (k + 1 < p.count) see(&layer.y, nullptr, 0, 0, layer.y.size[3]);
    c.plans[k] = make_conv_plan(layer, conv_kernels(layer.weight).shape, true, 1);
    conv_bytes = std::max(conv_bytes, c.plans[k].scratch_bytes);
  }
  // Whole blocks, or as many of their rows as leave the hidden pixels in the cache.
  ConvPlan& plan = c.plans[c.middle];
  const int64_t side[2] = {std::min<int64_t>(depthwise.active.grid.size[0], depthwise.y.size[2]),
                           std::min<int64_t>(depthwise.active.grid.size[1], depthwise.y.size[3])};
  for (plan.tiles[0] = plan.tiles[1] = 1;;) {
    for (int d = 0; d < 2; ++d) plan.tile[d] = static_cast<int32_t>((side[d] + plan.tiles[d] - 1) / plan.tiles[d]);
    int64_t in[2];
    for (int d = 0; d < 2; ++d)
      in[d] = std::min<int64_t>(
          (plan.tile[d] - 1) * depthwise.stride[d] + (depthwise.weight.size[2 + d] - 1) * depthwise.dilation[d] + 1,
          depthwise.x.size[2 + d]);
    c.pixels[0] = c.widens() ? in[0] * in[1] : 0;
    c.pixels[1] = c.narrows() ? int64_t{plan.tile[0]} * plan.tile[1] : 0;
    if ((c.pixels[0] + c.pixels[1]) * c.hidden * 4 <= kTileBytes || plan.tile[0] * plan.tile[1] == 1) break;
    ++plan.tiles[plan.tile[0] >= plan.tile[1] / 4 && plan.tile[0] > 1 ? 0 : 1];
  }
  if (c.widens()) {
    const ActiveView& active = p.layers[0].active;
    c.map_bytes = aligned(p.layers[0].y.size[0] * active.grid.count[0] * active.grid.count[1]);
  }
  c.rects_at = aligned(conv_bytes);
  c.hidden_at[0] = c.rects_at + aligned(std::max(c.pixels[0], c.pixels[1]) * static_cast<int64_t>(sizeof(ConvRect)));
  c.hidden_at[1] = c.hidden_at[0] + aligned(c.pixels[0] * c.hidden * 4);
  c.scratch_bytes = c.hidden_at[1] + aligned(c.pixels[1] * c.hidden * 4);
  c.scratch_at = 64 + c.map_bytes;  // after the counter of tiles and the map
  c.total_bytes = c.scratch_at + std::max(threads, 1) * c.scratch_bytes;
  return c;
}

int64_t active_blocks(const ActiveView& active) { return std::clamp<int64_t>(*active.count, 0, active.capacity); }

bool pays(const ConvChainParams& p) {
  const int32_t* block = p.layers[middle_of(p)].active.grid.size;
  if (std::min(block[0], block[1]) < kLeastSide) return false;
  int64_t bytes = 0;
  for (int32_t k = 0; k + 1 < p.count; ++k) {
    const Conv2dParams& layer = p.layers[k];
    bytes += active_blocks(layer.active) * layer.active.grid.size[0] * layer.active.grid.size[1] * layer.y.size[1] * 4;
  }
  return bytes >= kLeastBytes;
}

// A byte a block of the widening layer: is it active?
void map_blocks(const Chain& c, uint8_t* map) {
  const ActiveView& active = c.p->layers[0].active;
  const int64_t N = c.p->layers[0].y.size[0], rows = active.grid.count[0], columns = active.grid.count[1];
  std::memset(map, 0, static_cast<size_t>(c.map_bytes));
  for (int64_t b = 0; b < active_blocks(active); ++b) {
    const int32_t* at = active.indices + 3 * b;
    if (at[0] >= 0 && at[0] < N && at[1] >= 0 && at[1] < rows && at[2] >= 0 && at[2] < columns)
      map[(at[0] * rows + at[1]) * columns + at[2]] = 1;
  }
}

// What one thread works with.
struct Worker {
  const Chain& c;
  char* scratch;
  const uint8_t* map;
  ConvPlan plans[kMostChained];  // of the tile
  ConvRect* rects;
  int64_t count;

  Worker(const Chain& chain, char* memory, const uint8_t* blocks) : c(chain), scratch(memory), map(blocks) {
    std::copy(chain.plans, chain.plans + kMostChained, plans);
    rects = reinterpret_cast<ConvRect*>(memory + chain.rects_at);
  }

  ConvJob job_of(int32_t layer) const {
    const ConvPlan& plan = plans[layer];
    ConvJob job = conv_job(plan, static_cast<const char*>(plan.p.packed) + kTagBytes, scratch);
    job.rects = rects;
    return job;
  }

  // Pixels [columns) of a row, as rects that fill whole jobs.
  void add_row(int64_t n, int64_t row, Range columns, int64_t* listed) {
    while (columns.count() > 0) {
      const int64_t width = std::min(columns.count(), kWholeJob - *listed % kWholeJob);
      rects[count++] = {n, row, columns.begin, 1, static_cast<int32_t>(width)};
      columns.begin += width;
      *listed += width;
    }
  }

  // A 1x1 layer on the listed pixels.
  void run_listed(int32_t layer) const {
    const ConvPlan& plan = plans[layer];
    const ConvKernels& kernel = conv_kernels(plan.weight);
    ConvJob job = job_of(layer);
    for (int64_t done = 0; done < count; done += job.rect_count, job.rects += job.rect_count) {
      job.rect_count = 0;
      for (int64_t pixels = 0; done + job.rect_count < count && pixels < kWholeJob; ++job.rect_count)
        pixels += job.rects[job.rect_count].width;
      for (job.first_panel = 0; job.first_panel < plan.panels; job.first_panel += plan.job_panels) {
        job.panels = std::min(plan.job_panels, plan.panels - job.first_panel);
        kernel.run_job(plan, job);
      }
    }
  }

  // The hidden pixels that a tile of the depthwise layer reads: zeros in blocks that are not active.
  void widen(const ConvRect& tile) {
    const Conv2dParams& depthwise = plans[c.middle].p;
    const Range rows = inputs_of(depthwise, 0, tile.row, tile.height);
    const Range columns = inputs_of(depthwise, 1, tile.column, tile.width);
    char* hidden = scratch + c.hidden_at[0];
    for (TensorView* t : {&plans[0].p.y, &plans[c.middle].p.x})
      see(t, hidden, rows.begin, columns.begin, columns.count());
    const BlockGrid& grid = plans[0].p.active.grid;
    count = 0;
    int64_t listed = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const uint8_t* active = map + (tile.n * grid.count[0] + row / grid.size[0]) * grid.count[1];
      for (Range run = {columns.begin, columns.begin}; run.end < columns.end; run.begin = run.end) {
        const uint8_t is_active = active[run.begin / grid.size[1]];
        while (run.end < columns.end && active[run.end / grid.size[1]] == is_active)
          run.end = std::min((run.end / grid.size[1] + 1) * grid.size[1], columns.end);
        const int64_t before = (row - rows.begin) * columns.count() + run.begin - columns.begin, pixel = c.hidden * 4;
        if (is_active)
          add_row(tile.n, row, run, &listed);
        else
          std::memset(hidden + before * pixel, 0, static_cast<size_t>(run.count() * pixel));
      }
    }
    run_listed(0);
  }

  void run(const ConvRect& tile) {
    const int32_t last = c.p->count - 1;
    if (c.widens()) widen(tile);
    if (c.narrows())
      for (TensorView* t : {&plans[c.middle].p.y, &plans[last].p.x})
        see(t, scratch + c.hidden_at[1], tile.row, tile.column, tile.width);
    const ConvPlan& plan = plans[c.middle];
    ConvJob job = job_of(c.middle);
    rects[0] = tile;
    job.rect_count = job.panels = 1;
    for (; job.first_panel < plan.panels; ++job.first_panel) conv_kernels(plan.weight).run_job(plan, job);
    if (!c.narrows()) return;
    count = 0;
    int64_t listed = 0;
    for (int64_t row = tile.row; row < tile.row + tile.height; ++row)
      add_row(tile.n, row, {tile.column, tile.column + tile.width}, &listed);
    run_listed(last);
  }
};

void run_tiles(const Chain& c, char* workspace, const Parallel& parallel) {
  const ConvPlan& plan = c.depthwise();
  const int64_t tiles = active_blocks(plan.p.active) * plan.tiles[0] * plan.tiles[1];
  uint8_t* map = reinterpret_cast<uint8_t*>(workspace + 64);
  if (c.widens()) map_blocks(c, map);
  int64_t* next = new (workspace) int64_t{0};
  parallel_for(parallel, std::max(parallel.threads, 1), 1, [&](int64_t begin, int64_t) {
    Worker worker(c, workspace + c.scratch_at + begin * c.scratch_bytes, map);
    for (;;) {
      const int64_t tile = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (tile >= tiles) return;
      ConvRect rect;
      if (find_rect(plan, tile, &rect)) worker.run(rect);
    }
  });
}

}  // namespace
}  // namespace sbnet

bool sbnet_conv_chain_suits_cpu(const sbnet::ConvChainParams* p) {
  using namespace sbnet;
  if (p->count < 2 || p->count > kMostChained) return false;
  const int32_t middle = middle_of(*p), last = p->count - 1;
  if (middle >= p->count || middle > 1 || last - middle > 1) return false;
  for (int32_t k = 0; k <= last; ++k) {
    const Conv2dParams& layer = p->layers[k];
    if (!layer.packed || layer.x.dtype != DType::kF32 || (k < last && layer.residual.data)) return false;
    if (!k) continue;
    const TensorView &from = p->layers[k - 1].y, &to = layer.x;
    if (from.data != to.data || std::memcmp(from.size, to.size, sizeof(to.size)) ||
        std::memcmp(from.stride, to.stride, sizeof(to.stride)))
      return false;
  }
  if (may_overlap(p->layers[0].x, p->layers[last].y)) return false;  // tiles are written while others are read
  const Chain c = make_chain(*p, 1);
  const ConvPlan& depthwise = c.depthwise();
  for (int64_t panel = 0; panel < depthwise.panels; ++panel)
    if (!runs_straight(depthwise, panel)) return false;
  for (int32_t k = 0; k <= last; ++k)
    if (k != middle && !is_plain(c.plans[k])) return false;
  // Each of its pixels has a last one that reads it.
  return !c.narrows() || (p->layers[last].active.indices == depthwise.p.active.indices &&
                          !std::memcmp(&p->layers[last].active.grid, &depthwise.p.active.grid, sizeof(BlockGrid)));
}

int64_t sbnet_conv_chain_workspace_bytes_cpu(const sbnet::ConvChainParams* p, int32_t threads) {
  int64_t bytes = sbnet::make_chain(*p, threads).total_bytes;
  for (int32_t k = 0; k < p->count; ++k)
    bytes = std::max(bytes, sbnet_sparse_conv2d_workspace_bytes_cpu(&p->layers[k], threads));
  return bytes;
}

sbnet::Status sbnet_conv_chain_cpu(const sbnet::ConvChainParams* p, void* workspace, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const Conv2dParams& last = p->layers[p->count - 1];
  if (!pays(*p)) {
    for (int32_t k = 0; k < p->count; ++k) SBNET_TRY(sbnet_sparse_conv2d_cpu(&p->layers[k], workspace, parallel));
    return ok_status();
  }
  if (last.y.size[0]) run_tiles(make_chain(*p, parallel->threads), static_cast<char*>(workspace), *parallel);
  zero_fringe(last.y, last.fringe, *parallel);
  return ok_status();
}
