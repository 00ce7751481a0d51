// Sums of products of x and dy over the pixels of blocks. Included once by each conv_grad_<isa>.cpp, which defines
// SBNET_ISA, SBNET_LANES and SBNET_VECTORS first; see isa.h for why.
#pragma once
#include "cpu/masked/conv_grad_kernels.h"
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

#define SBNET_UNROLL _Pragma("GCC unroll 16")

// Input channels whose sums, with kVectors vectors of output channels each, fill the registers.
constexpr int kInputs = 6;

struct GradTile {
  int64_t n, row, column, height, width;  // of dy's plane
};

// What dy holds in a tile, [pixels][outputs in whole vectors]; zeros in the last lanes.
template <class T>
static void pack_gradients(const ConvGradTask& t, const GradTile& tile, float* to) {
  const TensorView& y = t.p->conv.y;
  const int64_t lanes = whole_lanes(t.outputs);
  const T* from = static_cast<const T*>(y.data) + tile.n * y.stride[0] + t.output * y.stride[1] +
                  tile.row * y.stride[2] + tile.column * y.stride[3];
  for (int64_t i = 0; i < tile.height; ++i, from += y.stride[2]) {
    float* row = to + i * tile.width * lanes;
    if (y.stride[1] == 1 || y.stride[3] != 1) {
      for (int64_t j = 0; j < tile.width; ++j)
        load_row(row + j * lanes, from + j * y.stride[3], y.stride[1], t.outputs);
    } else {  // NCHW memory: neighbours in a row are neighbours in memory
      for (int64_t k = 0; k < t.outputs; ++k)
        for (int64_t j = 0; j < tile.width; ++j) row[j * lanes + k] = widen(from[k * y.stride[1] + j]);
    }
    if (t.outputs < lanes)
      for (int64_t j = 0; j < tile.width; ++j)
        __builtin_memset(row + j * lanes + t.outputs, 0, (lanes - t.outputs) * sizeof(float));
  }
}

// What x holds under a tile, [patch_height][patch_width][slots]: zeros where the plane ends. Slots are input channels,
// or those of each output channel.
template <class T, bool kLanewise>
static void pack_inputs(const ConvGradTask& t, const GradTile& tile, int64_t slots, float* to) {
  const Conv2dParams& p = t.p->conv;
  const TensorView& x = p.x;
  const int64_t many = kLanewise ? p.weight.size[0] / p.groups : 1, count = kLanewise ? t.outputs : t.inputs;
  const int64_t top = tile.row * p.stride[0] - p.padding[0], left = tile.column * p.stride[1] - p.padding[1];
  const int64_t height = (tile.height - 1) * p.stride[0] + (p.weight.size[2] - 1) * p.dilation[0] + 1;
  const int64_t width = (tile.width - 1) * p.stride[1] + (p.weight.size[3] - 1) * p.dilation[1] + 1;
  const int64_t begin = smaller(larger(-left, 0), width), end = larger(smaller(width, x.size[3] - left), begin);
  const T* image = static_cast<const T*>(x.data) + tile.n * x.stride[0] + (kLanewise ? 0 : t.input * x.stride[1]);
  for (int64_t i = 0; i < height; ++i) {
    float* row = to + i * t.patch_width * slots;
    if (top + i < 0 || top + i >= x.size[2] || begin == end) {
      __builtin_memset(row, 0, width * slots * sizeof(float));
      continue;
    }
    __builtin_memset(row, 0, begin * slots * sizeof(float));
    __builtin_memset(row + end * slots, 0, (width - end) * slots * sizeof(float));
    const T* from = image + (top + i) * x.stride[2] + (left + begin) * x.stride[3];
    float* at = row + begin * slots;
    if (kLanewise && many > 1) {
      for (int64_t j = begin; j < end; ++j, at += slots, from += x.stride[3])
        for (int64_t k = 0; k < count; ++k) at[k] = widen(from[(t.output + k) / many * x.stride[1]]);
    } else {
      if (kLanewise) from += t.output * x.stride[1];
      if (x.stride[1] == 1 || x.stride[3] != 1) {
        for (int64_t j = begin; j < end; ++j, at += slots, from += x.stride[3]) load_row(at, from, x.stride[1], count);
      } else {
        for (int64_t c = 0; c < count; ++c)
          for (int64_t j = 0; j < end - begin; ++j) at[j * slots + c] = widen(from[c * x.stride[1] + j]);
      }
    }
    if (count < slots)
      for (int64_t j = begin; j < end; ++j)
        __builtin_memset(row + j * slots + count, 0, (slots - count) * sizeof(float));
  }
}

// sums[c][k] += x[pixel][c] dy[pixel][k] over the pixels of some tiles, for C input channels and V vectors of k. `x`:
// the tap's first element of the first tile's patch; steps of it in elements.
struct GradSteps {
  const GradTile* tiles;
  int64_t count, patch, row, column;  // of x: a tile's patch, a row of outputs, an output
  int64_t lanes;                      // of dy and the sums
};
template <int C, int V>
static __attribute__((noinline)) void add_pixels(const GradSteps& steps, const float* x, const float* dy, float* sums) {
  const int64_t lanes = steps.lanes, column = steps.column;
  Vec sum[C][V];
  SBNET_UNROLL for (int c = 0; c < C; ++c) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[c][v] = Vec{};
  for (int64_t t = 0; t < steps.count; ++t, x += steps.patch) {
    const float* row = x;
    for (int64_t i = 0; i < steps.tiles[t].height; ++i, row += steps.row) {
      const float* at = row;
      for (int64_t j = 0; j < steps.tiles[t].width; ++j, at += column, dy += lanes) {
        Vec other[V];
        SBNET_UNROLL for (int v = 0; v < V; ++v) other[v] = load(dy + v * kLanes);
        SBNET_UNROLL for (int c = 0; c < C; ++c) {
          const Vec one = splat(at[c]);
          SBNET_UNROLL for (int v = 0; v < V; ++v) sum[c][v] += one * other[v];
        }
      }
    }
  }
  SBNET_UNROLL for (int c = 0; c < C; ++c) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + c * lanes + v * kLanes;
    store(to, load(to) + sum[c][v]);
  }
}

template <int C, class... Arguments>
SBNET_INLINE void add_inputs(int64_t vectors, const Arguments&... arguments) {
  if (vectors >= kVectors)
    add_pixels<C, kVectors>(arguments...);
  else if (vectors >= 2)
    add_pixels<C, 2>(arguments...);
  else
    add_pixels<C, 1>(arguments...);
}
SBNET_INLINE int64_t taken(int64_t vectors) { return vectors >= kVectors ? kVectors : vectors >= 2 ? 2 : 1; }

static GradSteps steps_of(const ConvGradTask& t, const GradTile* tiles, int64_t count, int64_t slots) {
  const Conv2dParams& p = t.p->conv;
  return {tiles,
          count,
          t.patch_height * t.patch_width * slots,
          p.stride[0] * t.patch_width * slots,
          p.stride[1] * slots,
          whole_lanes(t.outputs)};
}

static void add_tiles(const ConvGradTask& t, const GradTile* tiles, int64_t count, const float* patch,
                      const float* dy) {
  const Conv2dParams& p = t.p->conv;
  const int64_t slots = t.inputs, lanes = whole_lanes(t.outputs), vectors = lanes / kLanes;
  const GradSteps steps = steps_of(t, tiles, count, slots);
  for (int64_t v = 0; v < vectors; v += taken(vectors - v))
    for (int64_t r = 0; r < p.weight.size[2]; ++r)
      for (int64_t s = 0; s < p.weight.size[3]; ++s)
        for (int64_t c = 0; c < slots; c += kInputs) {
          const float* x = patch + (r * p.dilation[0] * t.patch_width + s * p.dilation[1]) * slots + c;
          float* sums = t.sums + ((r * p.weight.size[3] + s) * slots + c) * lanes + v * kLanes;
#define SBNET_ADD(C) add_inputs<C>(vectors - v, steps, x, dy + v * kLanes, sums)
          switch (smaller(kInputs, slots - c)) {
            case 1:
              SBNET_ADD(1);
              break;
            case 2:
              SBNET_ADD(2);
              break;
            case 3:
              SBNET_ADD(3);
              break;
            case 4:
              SBNET_ADD(4);
              break;
            case 5:
              SBNET_ADD(5);
              break;
            default:
              SBNET_ADD(6);
          }
#undef SBNET_ADD
        }
}

// Depthwise: lanes are output channels of both.
template <int V>
static __attribute__((noinline)) void add_lanes(const GradSteps& steps, const float* x, const float* dy, float* sums) {
  Vec sum[V];
  SBNET_UNROLL for (int v = 0; v < V; ++v) sum[v] = Vec{};
  for (int64_t t = 0; t < steps.count; ++t, x += steps.patch) {
    const float* row = x;
    for (int64_t i = 0; i < steps.tiles[t].height; ++i, row += steps.row) {
      const float* at = row;
      for (int64_t j = 0; j < steps.tiles[t].width; ++j, at += steps.column, dy += steps.lanes)
        SBNET_UNROLL for (int v = 0; v < V; ++v) sum[v] += load(at + v * kLanes) * load(dy + v * kLanes);
    }
  }
  SBNET_UNROLL for (int v = 0; v < V; ++v) store(sums + v * kLanes, load(sums + v * kLanes) + sum[v]);
}

static void add_tiles_of_lanes(const ConvGradTask& t, const GradTile* tiles, int64_t count, const float* patch,
                               const float* dy) {
  const Conv2dParams& p = t.p->conv;
  const int64_t lanes = whole_lanes(t.outputs), vectors = lanes / kLanes;
  const GradSteps steps = steps_of(t, tiles, count, lanes);
  float* sums = t.sums;
  for (int64_t r = 0; r < p.weight.size[2]; ++r)
    for (int64_t s = 0; s < p.weight.size[3]; ++s, sums += lanes) {
      const float* x = patch + (r * p.dilation[0] * t.patch_width + s * p.dilation[1]) * lanes;
      int64_t v = 0;
      for (; v + kVectors <= vectors; v += kVectors)
        add_lanes<kVectors>(steps, x + v * kLanes, dy + v * kLanes, sums + v * kLanes);
      for (; v < vectors; ++v) add_lanes<1>(steps, x + v * kLanes, dy + v * kLanes, sums + v * kLanes);
    }
}

// In runs: a chain of hundreds of additions loses more than PyTorch's sum.
static void add_bias(const ConvGradTask& t, int64_t pixels, const float* dy) {
  constexpr int64_t kRun = 16;
  const int64_t lanes = whole_lanes(t.outputs);
  for (int64_t v = 0; v < lanes; v += kLanes) {
    Vec sum = Vec{};
    for (int64_t first = 0; first < pixels; first += kRun) {
      Vec run = Vec{};
      for (int64_t i = first; i < smaller(first + kRun, pixels); ++i) run += load(dy + i * lanes + v);
      sum += run;
    }
    store(t.bias + v, load(t.bias + v) + sum);
  }
}

template <class T>
static void run_tiles(const ConvGradTask& t, const GradTile* tiles, int64_t count) {
  const bool lanewise = is_lanewise(*t.p);
  const int64_t lanes = whole_lanes(t.outputs), slots = lanewise ? lanes : t.inputs;
  float* const dy = t.scratch;
  float* const patch = dy + kGradTilePixels * lanes;
  int64_t pixels = 0;
  for (int64_t k = 0; k < count; ++k) {
    pack_gradients<T>(t, tiles[k], dy + pixels * lanes);
    pixels += tiles[k].height * tiles[k].width;
    float* const own = patch + k * t.patch_height * t.patch_width * slots;
    if (lanewise)
      pack_inputs<T, true>(t, tiles[k], slots, own);
    else
      pack_inputs<T, false>(t, tiles[k], slots, own);
  }
  if (t.bias) add_bias(t, pixels, dy);
  if (lanewise)
    add_tiles_of_lanes(t, tiles, count, patch, dy);
  else
    add_tiles(t, tiles, count, patch, dy);
}

// The tiles of a part, as many together as fit: sums are read and written once for all of them.
static void run_task(const ConvGradTask& t) {
  const Conv2dParams& p = t.p->conv;
  const BlockGrid& grid = p.active.grid;
  GradTile tiles[kGradTilePixels];
  int64_t count = 0;
  const auto run = [&] {
    if (count) by_dtype<Half, BFloat>(p.x.dtype, [&](auto e) { run_tiles<decltype(e)>(t, tiles, count); });
    count = 0;
  };
  for (int64_t slot = t.begin; slot < t.end; ++slot) {
    const int32_t* block = p.active.indices + 3 * slot;
    const int64_t n = block[0], i = block[1], j = block[2];
    if (n < 0 || n >= p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
    const int64_t top = i * grid.size[0], bottom = smaller(top + grid.size[0], p.y.size[2]);
    const int64_t left = j * grid.size[1], right = smaller(left + grid.size[1], p.y.size[3]);
    for (int64_t row = top; row < bottom; row += t.tile_height)
      for (int64_t column = left; column < right; column += t.tile_width) {
        tiles[count++] = {n, row, column, smaller(t.tile_height, bottom - row), smaller(t.tile_width, right - column)};
        if (count == t.most_tiles) run();
      }
  }
  run();
}

}  // namespace SBNET_ISA
}  // namespace sbnet
