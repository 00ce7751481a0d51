// The general Hopper convolution: how a layer is cut into tiles.
#pragma once
#include <algorithm>
#include <iterator>
#include <numeric>

#include "cuda/sm90/conv/conv_general_plan.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90::general {

constexpr int kMaxBox = 256;             // of TMA, in pixels of a side
constexpr int kHalfShared = 113 * 1024;  // bytes of shared memory that two CTAs on a multiprocessor may have each

// The widest copies that addresses and distances of these bytes allow.
inline int word_of(std::initializer_list<int64_t> bytes) {
  int64_t all = 16;
  for (const int64_t b : bytes) all |= b;
  return static_cast<int>(all & -all);
}
inline int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

// Widths of a tile in output channels, and cycles that 64 positions times 16 input channels take: products of few
// channels are bound by shared memory.
struct Width {
  int outputs, cycles;
};
constexpr Width kWidths[] = {{96, 48}, {80, 40}, {64, 32}, {32, 24}, {16, 20}};
constexpr double kNotOverlapped = 1.15;    // epilogues where a multiprocessor has a single CTA
constexpr int64_t kTapCycles = 120;        // of a tile, however little there is to multiply
constexpr int64_t kExchangeCycles = 2500;  // of sums, between CTAs that share a tile
constexpr int kMaxLogCluster = 2;
constexpr double kClustered = 1.05;  // clusters find room on fewer multiprocessors
inline int64_t tap_cycles(int steps, const Width& width) {
  return std::max<int64_t>(steps * 4 * width.cycles, kTapCycles);
}

// Cycles that `tiles` of `cycles` each take the device, where up to 2^log_cluster CTAs share one that is left over.
// (Two at a time on a multiprocessor take twice as long as one.)
inline double device_cycles(const DeviceInfo& device, const Width& width, int64_t tiles, int64_t cycles,
                            int log_cluster) {
  const int64_t rounds = tiles / device.sm_count, left = tiles % device.sm_count;
  int log = 0;
  while (log < log_cluster && left << (log + 1) <= device.sm_count) ++log;
  const int64_t last = left ? (cycles >> log) + (log ? kExchangeCycles : 0) : 0;
  return static_cast<double>(rounds * cycles + last) * (width.outputs > 64 ? kNotOverlapped : 1);
}

// The tensors, and chunks of channels: of `inputs` and `outputs` of a group, of which so many are merged.
inline void fill_operands(const Conv2dParams& p, int64_t inputs, int64_t outputs, Args* a) {
  const int64_t chunks = (p.groups + a->merged - 1) / a->merged;
  a->tiles_per_chunk = FastDiv(a->columns.divisor / chunks);
  a->group_inputs = FastDiv(inputs), a->group_outputs = FastDiv(outputs);
  a->chunk_inputs = static_cast<int>(inputs * a->merged), a->chunk_outputs = static_cast<int>(outputs * a->merged);
  a->channels = static_cast<int>(p.x.size[1]);

  const PixelStrides x = pixel_strides(p.x), y = pixel_strides(p.y);
  const int64_t *size = p.weight.size, *stride = p.weight.stride;
  const int64_t w_k = size[0] > 1 ? stride[0] * 2 : 0, w_r = size[2] > 1 ? stride[2] * 2 : 0,
                w_s = size[3] > 1 ? stride[3] * 2 : 0;
  a->x = static_cast<const char*>(p.x.data), a->w = static_cast<const char*>(p.weight.data);
  a->x_n = x.n * 2, a->x_y = static_cast<int>(x.y * 2), a->x_x = static_cast<int>(x.x * 2);
  a->w_k = w_k, a->w_r = static_cast<int>(w_r), a->w_s = static_cast<int>(w_s);
  a->x_h = static_cast<int>(p.x.size[2]), a->x_w = static_cast<int>(p.x.size[3]);
  a->x_word = word_of({address(p.x.data), x.n * 2, x.y * 2, x.x * 2, chunks > 1 ? a->chunk_inputs * 2 : 0});
  a->w_word = word_of({address(p.weight.data), w_k, w_r, w_s, a->merged > 1 ? inputs * 2 : 0});
  a->y_c = size[0] > 1 ? p.y.stride[1] : 1, a->residual_c = size[0] > 1 ? p.residual.stride[1] : 1;
  const int64_t step = chunks > 1 ? a->chunk_outputs * 2 : 0;
  a->out_word = word_of({address(p.y.data), y.n * 2, y.y * 2, y.x * 2, step, a->y_c == 1 ? 0 : 2});
  if (p.residual.data) {
    const PixelStrides r = pixel_strides(p.residual);
    a->out_word = std::min(
        a->out_word, word_of({address(p.residual.data), r.n * 2, r.y * 2, r.x * 2, step, a->residual_c == 1 ? 0 : 2}));
  }
  for (int d = 0; d < 2; ++d) {
    a->stride[d] = p.stride[d], a->padding[d] = p.padding[d], a->dilation[d] = p.dilation[d];
    a->kernel[d] = static_cast<int>(size[2 + d]);
  }
  // By TMA where it can: rows of weights of one group, patches of pixels that are neighbours.
  const bool boxes = p.stride[0] == 1 && p.stride[1] == 1 && tma_reads(p.x) && a->x_word == 16;
  if (boxes) a->x_word = 0;
  if (weights_packed(p.weight) && inputs % 8 == 0 && a->merged == 1) a->w_word = 0;
  a->mixed = a->merged > 1 || (boxes && chunks > 1 && a->chunk_inputs % 16);
  a->zeros = {p.fringe, p.y}, a->zeros_plan = FringePlan(p);
}

// Fills in all that concerns channels, and the tensors. Returns the width of tiles, which is from `narrowest` to
// `widest`.
inline int choose_columns(const Conv2dParams& p, const DeviceInfo& device, Args* a, int narrowest = 16,
                          int widest = 96) {
  const int64_t inputs = p.weight.size[1], outputs = p.weight.size[0] / p.groups;
  const int64_t pixels = p.active.capacity * std::min<int64_t>(p.active.grid.size[0], p.y.size[2]) *
                         std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  double least = 0;
  int chosen = 0;
  const int64_t most = inputs > 64 ? 1 : std::min<int64_t>(64 / inputs, p.groups);
  const int64_t taps = p.weight.size[2] * p.weight.size[3];
  for (int64_t merged = 1; merged <= most; ++merged) {
    const int64_t chunks = (p.groups + merged - 1) / merged, slices = (inputs * merged + 63) / 64;
    const int last = static_cast<int>((inputs * merged - (slices - 1) * 64 + 15) / 16);
    for (const Width& w : kWidths) {
      if (w.outputs < narrowest || w.outputs > widest) continue;
      if (merged > 1 && outputs * merged > w.outputs) continue;  // a chunk's only tile has its diagonal in one place
      const int64_t tiles = chunks * ((outputs * merged + w.outputs - 1) / w.outputs);
      // Of all blocks, and of a tenth, where few wide tiles would leave multiprocessors idle.
      const int64_t of_tile = ((slices - 1) * tap_cycles(4, w) + tap_cycles(last, w)) * taps;
      for (int log_cluster = 0; log_cluster <= kMaxLogCluster && slices >> log_cluster; ++log_cluster) {
        const double cycles = (device_cycles(device, w, (pixels / 256 + 1) * tiles, of_tile, log_cluster) +
                               4 * device_cycles(device, w, (pixels / 2560 + 1) * tiles, of_tile, log_cluster)) *
                              (log_cluster ? kClustered : 1);
        if (least > 0 && cycles >= least) continue;
        least = cycles, chosen = w.outputs;
        a->merged = static_cast<int>(merged), a->log_cluster = log_cluster;
        a->slices = static_cast<int>(slices), a->last_steps = last;
        a->columns = FastDiv(tiles);
      }
    }
  }
  fill_operands(p, inputs, outputs, a);
  return chosen;
}

// How taps share patches: those of a patch lie whole strides apart. All that do, or those of a kernel row, or none.
enum class Sharing { kAll, kRow, kNone };
struct Taps {                // of one direction: kernel places 0, period, 2 * period ... share
  int kernel, period, step;  // step: pixels of the patch from one of them to the next
  Taps(const Conv2dParams& p, int d, bool share) : kernel(static_cast<int>(p.weight.size[2 + d])) {
    const int apart = p.stride[d] / std::gcd(p.stride[d], p.dilation[d]);
    period = share ? std::min(apart, kernel) : kernel;
    step = static_cast<int>(int64_t{period} * p.dilation[d] / p.stride[d]);
  }
  int64_t reach() const { return int64_t{(kernel - 1) / period} * step; }
};

// What a launch's instantiation says of it.
struct Tile {
  int outputs, tap_bytes, weights_at, slices, ctas;
};

// One way to cut the blocks into tiles.
struct Cut {
  Shape shape;
  int units, unit_h, unit_w;
  Sharing sharing;
  int64_t patch_h, patch_w, pitch, positions, patch_bytes, group_stride, second, down, across, shared;
  int patch_stages, weight_stages;
  double cycles = 0;  // a pixel takes, about; 0 where shared memory does not hold it

  Cut() = default;
  Cut(const Conv2dParams& p, const Tile& tile, Shape shape, int units, int unit_h, int unit_w, Sharing sharing)
      : shape(shape), units(units), unit_h(unit_h), unit_w(unit_w), sharing(sharing) {
    const Taps rows(p, 0, sharing == Sharing::kAll), columns(p, 1, sharing != Sharing::kNone);
    patch_h = unit_h + rows.reach(), patch_w = unit_w + columns.reach();
    if (patch_h * patch_w > 227 * 8 || std::max(patch_h, patch_w) > kMaxBox ||
        (shape == Shape::kLinear && (unit_h - 1) * patch_w + unit_w > 256 / units))
      return;
    pitch = shape == Shape::kCells ? 2 * patch_w : patch_w;
    const int64_t unit_positions = patch_h * pitch;
    positions = unit_positions * (shape == Shape::kCells ? units / 2 : units);
    group_stride = shape == Shape::kLinear ? 8 : patch_w;
    second = units > 1 ? unit_positions : shape == Shape::kLinear ? kPositions : 8;
    const int64_t read = second + 15 * group_stride + 8 + rows.reach() * pitch + columns.reach();
    patch_bytes = (positions * 128 + 1023) / 1024 * 1024;

    // Rings. Two CTAs on a multiprocessor hide each other's epilogues; but a tile of several patches needs room for
    // two, so that the next one comes under the products of the last.
    const int groups = rows.period * columns.period;
    const int64_t fixed = tile.weights_at + std::max<int64_t>(read * 128 - patch_bytes, 0);
    auto fits = [&](int64_t room, int patches, int weights) {
      patch_stages = patches;
      weight_stages = static_cast<int>(
          std::clamp<int64_t>((room - fixed - patches * patch_bytes) / tile.tap_bytes, 0, kMaxWeightStages));
      return weight_stages >= weights;
    };
    bool half = tile.ctas == 2 && (fits(kHalfShared, 2, 4) || (groups * tile.slices == 1 && fits(kHalfShared, 1, 3)));
    // A patch of few taps is read before the next one but one has come.
    if (!half && !(groups > 1 && fits(kSharedLimit, 3, 4)) && !fits(kSharedLimit, 2, 3)) {
      half = tile.ctas == 2 && fits(kHalfShared, 1, 3);
      if (!half && !fits(kSharedLimit, 1, 2)) return;
    }
    shared = fixed + weight_stages * tile.tap_bytes + patch_stages * patch_bytes;

    const int64_t block_h = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]),
                  block_w = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
    down = (block_h + unit_h - 1) / unit_h, across = (block_w + unit_w - 1) / unit_w;
    const auto width =
        std::find_if(std::begin(kWidths), std::end(kWidths), [&](const Width& w) { return w.outputs == tile.outputs; });
    const int taps = rows.kernel * columns.kernel;
    const double products = static_cast<double>(taps * tap_cycles(4, *width));
    const double loads = static_cast<double>(positions * 128 * groups + int64_t{taps} * tile.tap_bytes) / 24;
    cycles = half                ? std::max(products, loads)
             : patch_stages >= 2 ? std::max(products, loads) * kNotOverlapped
                                 : products + loads;
    cycles *= static_cast<double>(down * across) / static_cast<double>(units * block_h * block_w);
  }

  void apply(const Conv2dParams& p, Args* a) const {
    const Taps rows(p, 0, sharing == Sharing::kAll), columns(p, 1, sharing != Sharing::kNone);
    a->shape = shape, a->units = units, a->unit_h = unit_h, a->unit_w = unit_w;
    a->units_per_block = FastDiv(down * across), a->units_per_row = FastDiv(across);
    a->pitch = FastDiv(pitch), a->patch_h = static_cast<int>(patch_h), a->patch_w = static_cast<int>(patch_w);
    a->patch_rows = FastDiv(patch_h), a->positions = static_cast<int>(positions);
    a->patch_bytes = static_cast<int>(patch_bytes);
    a->group_stride = static_cast<int>(group_stride), a->second = static_cast<int>(second);
    a->patch_stages = patch_stages, a->weight_stages = weight_stages;
    int tap = 0;
    for (int y = 0; y < rows.period; ++y)
      for (int x = 0; x < columns.period; ++x) {
        for (int r = y; r < rows.kernel; r += rows.period)
          for (int s = x; s < columns.kernel; s += columns.period)
            a->tap[tap++] = {static_cast<int>(r / rows.period * rows.step * pitch + s / columns.period * columns.step),
                             a->w_word ? r * a->w_r + s * a->w_s : r * columns.kernel + s};
        a->group[a->groups++] = {y * p.dilation[0] - p.padding[0], x * p.dilation[1] - p.padding[1], tap};
      }
  }
};

// The same boxes of float32: 32 channels of pixels, or of a tap of packed weights. TMA rounds them to tf32.
inline Status float_map(CUtensorMap* m, const char* name, int rank, void* data, const cuuint64_t* size,
                        const cuuint64_t* stride_bytes, const cuuint32_t* box) {
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  const EncodeFn encode = encode_function();
  if (!encode) return make_status(Code::kDeviceError, "%s: the driver has no cuTensorMapEncodeTiled", kOp);
  const CUresult r = encode(m, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, rank, data, size, stride_bytes, box, ones,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r == CUDA_SUCCESS) return ok_status();
  return make_status(Code::kDeviceError, "%s: %s: cuTensorMapEncodeTiled failed with code %d", kOp, name,
                     static_cast<int>(r));
}
inline Status make_float_maps(const Conv2dParams& p, const Cut& cut, const Tile& tile, const Args& a, Maps* maps) {
  if (!a.x_word) {
    const PixelStrides x = pixel_strides(p.x);
    const cuuint64_t size[4] = {cuuint64_t(p.x.size[1]), cuuint64_t(p.x.size[3]), cuuint64_t(p.x.size[2]),
                                cuuint64_t(p.x.size[0])};
    const cuuint64_t stride[3] = {cuuint64_t(x.x) * 4, cuuint64_t(x.y) * 4, cuuint64_t(x.n) * 4};
    const cuuint32_t rows = cut.shape == Shape::kCells ? 1 : static_cast<cuuint32_t>(cut.patch_h);
    const cuuint32_t box[4] = {32, cuuint32_t(cut.patch_w), rows, 1};
    SBNET_TRY(float_map(&maps->x, "x", 4, p.x.data, size, stride, box));
  }
  if (!a.w_word) {
    const int64_t* w = p.weight.size;
    const cuuint64_t size[3] = {cuuint64_t(w[1]), cuuint64_t(w[2] * w[3]), cuuint64_t(w[0])};
    const cuuint64_t stride[2] = {size[0] * 4, size[0] * size[1] * 4};
    const cuuint32_t box[3] = {32, 1, cuuint32_t(tile.outputs)};
    SBNET_TRY(float_map(&maps->w, "weight", 3, p.weight.data, size, stride, box));
  }
  return ok_status();
}

inline Status make_maps(const Conv2dParams& p, const Cut& cut, const Tile& tile, const Args& a, Maps* maps) {
  if (p.x.dtype == DType::kF32) return make_float_maps(p, cut, tile, a, maps);
  if (!a.x_word)
    SBNET_TRY(plane_map(&maps->x, "x", p.x, static_cast<int>(cut.patch_w),
                        cut.shape == Shape::kCells ? 1 : static_cast<int>(cut.patch_h)));
  if (a.list.pieces)
    SBNET_TRY(slab_map(&maps->w, p, tile.outputs, int64_t{a.list.count} * p.weight.size[2] * p.weight.size[3]));
  else if (!a.w_word)
    SBNET_TRY(tap_map(&maps->w, p, tile.outputs));
  return ok_status();
}

inline Cut cheapest_cut(const Conv2dParams& p, const Tile& tile) {
  const int block_h = static_cast<int>(std::min<int64_t>(p.active.grid.size[0], p.y.size[2])),
            block_w = static_cast<int>(std::min<int64_t>(p.active.grid.size[1], p.y.size[3]));
  Cut best;
  auto consider = [&](Shape shape, int units, int h, int w, Sharing sharing) {
    const Cut cut(p, tile, shape, units, h, w, sharing);
    if (cut.cycles > 0 && (best.cycles == 0 || cut.cycles < best.cycles * 0.99)) best = cut;
  };
  for (const Sharing sharing : {Sharing::kAll, Sharing::kRow, Sharing::kNone}) {
    consider(Shape::kStrips, 1, 16, 16, sharing);
    consider(Shape::kStrips, 2, 16, 8, sharing);
    consider(Shape::kCells, 4, 8, 8, sharing);
    const int64_t reach = Taps(p, 1, sharing != Sharing::kNone).reach();
    for (int units = 1; units <= 2; ++units)
      for (int parts = 1; parts <= 16; parts *= 2) {  // of a block's width
        const int w = (block_w + parts - 1) / parts;
        if (w > 256 / units) continue;
        const int most = static_cast<int>((256 / units - w) / (w + reach)) + 1, down = (block_h + most - 1) / most;
        consider(Shape::kLinear, units, (block_h + down - 1) / down, w, sharing);
      }
  }
  return best;
}

// Launches kKernel, whose parameters are Maps and A, on the cheapest cut. operands: as TMA is to read them, if not as p
// says.
template <class C, auto kKernel, class A>
Status launch_cut(const Conv2dParams& p, A& a, const DeviceInfo& device, cudaStream_t stream,
                  const Conv2dParams* operands = nullptr) {
  const Tile tile = {C::kOutputs, C::kTap, C::kWeightsAt, a.slices, C::kCtas};
  const Cut cut = cheapest_cut(p, tile);
  cut.apply(p, &a);
  Maps maps;
  SBNET_TRY(make_maps(operands ? *operands : p, cut, tile, a, &maps));
  const int64_t tiles = (p.active.capacity * a.units_per_block.divisor + a.units - 1) / a.units * a.columns.divisor;
  if (tiles == 0 && !has_fringe(p)) return ok_status();
  SBNET_TRY(allow_most_shared<kKernel>(device, kSharedLimit));
  int clusters = device.sm_count;  // one CTA on a multiprocessor
  if (cut.shared - C::kWeightsAt < 3 * C::kSums) a.log_cluster = 0;
  if (a.log_cluster) SBNET_TRY(clusters_that_fit<kKernel>(device, kThreads, kSharedLimit, &a.log_cluster, &clusters));
  const int64_t room = int64_t{clusters << a.log_cluster} * (C::kCtas == 2 && cut.shared <= kHalfShared ? 2 : 1);
  const ClusterLaunch launch(has_fringe(p) ? room : std::min(tiles << a.log_cluster, room), kThreads,
                             static_cast<int>(cut.shared), a.log_cluster, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, a));
  return ok_status();
}

}  // namespace sbnet::sm90::general
