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

// sums[c][k] += x[pixel][c] dy[pixel][k] over the pixels of a tile, for C input channels and V vectors of k. `x`: the
// tap's first element; steps of it in elements.
template <int C, int V>
static __attribute__((noinline)) void add_pixels(const float* x, int64_t row_step, int64_t column_step, const float* dy,
                                                 int64_t lanes, int64_t height, int64_t width, float* sums) {
  Vec sum[C][V];
  SBNET_UNROLL for (int c = 0; c < C; ++c) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[c][v] = Vec{};
  for (int64_t i = 0; i < height; ++i, x += row_step) {
    const float* at = x;
    for (int64_t j = 0; j < width; ++j, at += column_step, dy += lanes) {
      Vec other[V];
      SBNET_UNROLL for (int v = 0; v < V; ++v) other[v] = load(dy + v * kLanes);
      SBNET_UNROLL for (int c = 0; c < C; ++c) {
        const Vec one = splat(at[c]);
        SBNET_UNROLL for (int v = 0; v < V; ++v) sum[c][v] += one * other[v];
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

static void add_tile(const ConvGradTask& t, const GradTile& tile, const float* patch, const float* dy) {
  const Conv2dParams& p = t.p->conv;
  const int64_t slots = t.inputs, lanes = whole_lanes(t.outputs), vectors = lanes / kLanes;
  const int64_t row_step = p.stride[0] * t.patch_width * slots, column_step = p.stride[1] * slots;
  for (int64_t v = 0; v < vectors; v += taken(vectors - v))
    for (int64_t r = 0; r < p.weight.size[2]; ++r)
      for (int64_t s = 0; s < p.weight.size[3]; ++s)
        for (int64_t c = 0; c < slots; c += kInputs) {
          const float* x = patch + (r * p.dilation[0] * t.patch_width + s * p.dilation[1]) * slots + c;
          float* sums = t.sums + ((r * p.weight.size[3] + s) * slots + c) * lanes + v * kLanes;
#define SBNET_ADD(C) \
  add_inputs<C>(vectors - v, x, row_step, column_step, dy + v * kLanes, lanes, tile.height, tile.width, sums)
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
static __attribute__((noinline)) void add_lanes(const float* x, int64_t row_step, int64_t column_step, const float* dy,
                                                int64_t lanes, int64_t height, int64_t width, float* sums) {
  Vec sum[V];
  SBNET_UNROLL for (int v = 0; v < V; ++v) sum[v] = Vec{};
  for (int64_t i = 0; i < height; ++i, x += row_step) {
    const float* at = x;
    for (int64_t j = 0; j < width; ++j, at += column_step, dy += lanes)
      SBNET_UNROLL for (int v = 0; v < V; ++v) sum[v] += load(at + v * kLanes) * load(dy + v * kLanes);
  }
  SBNET_UNROLL for (int v = 0; v < V; ++v) store(sums + v * kLanes, load(sums + v * kLanes) + sum[v]);
}

static void add_tile_of_lanes(const ConvGradTask& t, const GradTile& tile, const float* patch, const float* dy) {
  const Conv2dParams& p = t.p->conv;
  const int64_t lanes = whole_lanes(t.outputs), vectors = lanes / kLanes;
  const int64_t row_step = p.stride[0] * t.patch_width * lanes, column_step = p.stride[1] * lanes;
  float* sums = t.sums;
  for (int64_t r = 0; r < p.weight.size[2]; ++r)
    for (int64_t s = 0; s < p.weight.size[3]; ++s, sums += lanes) {
      const float* x = patch + (r * p.dilation[0] * t.patch_width + s * p.dilation[1]) * lanes;
      int64_t v = 0;
      for (; v + kVectors <= vectors; v += kVectors)
        add_lanes<kVectors>(x + v * kLanes, row_step, column_step, dy + v * kLanes, lanes, tile.height, tile.width,
                            sums + v * kLanes);
      for (; v < vectors; ++v)
        add_lanes<1>(x + v * kLanes, row_step, column_step, dy + v * kLanes, lanes, tile.height, tile.width,
                     sums + v * kLanes);
    }
}

static void add_bias(const ConvGradTask& t, const GradTile& tile, const float* dy) {
  const int64_t lanes = whole_lanes(t.outputs);
  for (int64_t v = 0; v < lanes; v += kLanes) {
    Vec sum = Vec{};
    for (int64_t i = 0; i < tile.height * tile.width; ++i) sum += load(dy + i * lanes + v);
    store(t.bias + v, load(t.bias + v) + sum);
  }
}

template <class T>
static void run_tile(const ConvGradTask& t, const GradTile& tile) {
  const bool lanewise = is_lanewise(*t.p);
  float* const dy = t.scratch;
  float* const patch = dy + kGradTilePixels * whole_lanes(t.outputs);
  pack_gradients<T>(t, tile, dy);
  if (t.bias) add_bias(t, tile, dy);
  if (lanewise) {
    pack_inputs<T, true>(t, tile, whole_lanes(t.outputs), patch);
    add_tile_of_lanes(t, tile, patch, dy);
  } else {
    pack_inputs<T, false>(t, tile, t.inputs, patch);
    add_tile(t, tile, patch, dy);
  }
}

static void run_task(const ConvGradTask& t) {
  const Conv2dParams& p = t.p->conv;
  const BlockGrid& grid = p.active.grid;
  for (int64_t slot = t.begin; slot < t.end; ++slot) {
    const int32_t* block = p.active.indices + 3 * slot;
    const int64_t n = block[0], i = block[1], j = block[2];
    if (n < 0 || n >= p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
    const int64_t top = i * grid.size[0], bottom = smaller(top + grid.size[0], p.y.size[2]);
    const int64_t left = j * grid.size[1], right = smaller(left + grid.size[1], p.y.size[3]);
    for (int64_t row = top; row < bottom; row += t.tile_height)
      for (int64_t column = left; column < right; column += t.tile_width) {
        const GradTile tile = {n, row, column, smaller(t.tile_height, bottom - row),
                               smaller(t.tile_width, right - column)};
        by_dtype<Half, BFloat>(p.x.dtype, [&](auto e) { run_tile<decltype(e)>(t, tile); });
      }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
