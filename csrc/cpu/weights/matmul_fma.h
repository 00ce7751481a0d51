// Products with block-sparse weights by fused multiply-adds of float32 vectors; matmul_kernels.h describes the order.
// Included once by each matmul_<isa>.cpp, which defines SBNET_ISA, SBNET_LANES and SBNET_VECTORS first.
#pragma once
#include "cpu/masked/conv_simd.h"
#include "cpu/weights/matmul_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

#define SBNET_UNROLL _Pragma("GCC unroll 16")

constexpr int kGroup = SBNET_GROUP;            // rows of a microkernel: with two vectors each they fill the registers
constexpr int kSquare = kGroup == 12 ? 8 : 4;  // input features of a weight gradient's microkernel

SBNET_INLINE bool has_gate(const BlocksparseMatmulParams& p, int64_t block) { return !p.gate || p.gate[block] != 0; }

// An entry of a look-up table, if it names an input block and a stored block.
SBNET_INLINE bool entry_at(const BlocksparseMatmulParams& p, const MatmulTask& task, int64_t i, int64_t* in,
                           int64_t* block) {
  *in = task.entries[2 * i];
  *block = task.entries[2 * i + 1];
  return *in >= 0 && *in < task.in_blocks && *block >= 0 && *block < p.layout.shape.blocks && has_gate(p, *block);
}

// ---- Packing

template <class T>
static void pack_block(const T* from, int64_t size, bool transposed, float gate, float* to) {
  for (int64_t i = 0; i < size; ++i, to += size) {
    load_row(to, transposed ? from + i : from + i * size, transposed ? size : 1, size);
    // In the weights' own dtype, as PyTorch's weight * gate: a product is rounded once.
    if (gate != 1.0f)
      for (int64_t k = 0; k < size; ++k) {
        T rounded;
        narrow(&rounded, to[k] * gate);
        to[k] = widen(rounded);
      }
  }
}

template <class T>
static void pack_weights_of(const BlocksparseMatmulParams& p, float* packed, int64_t begin, int64_t end) {
  const int64_t size = p.layout.shape.block_size;
  for (int64_t b = begin; b < end; ++b)
    if (has_gate(p, b))
      pack_block(static_cast<const T*>(p.weight) + b * size * size, size, p.transposed, p.gate ? p.gate[b] : 1.0f,
                 packed + b * size * size);
}

// Rows first ... first + rows of the tile as one panel [feature][kRows], zeros for rows that are none and for features
// beyond the last.
template <class T>
static void pack_panel(const TensorView& t, const int64_t* rows, int64_t count, int64_t height, int64_t features,
                       float* to) {
  const T* data = static_cast<const T*>(t.data);
  const int64_t stride = t.stride[1], F = t.size[1];
  constexpr int64_t kChunk = 64;
  alignas(64) float chunk[kGroup][kChunk];
  for (int64_t f = 0; f < features; f += kChunk) {
    const int64_t wide = smaller(kChunk, features - f), inside = larger(0, smaller(wide, F - f));
    for (int64_t i = 0; i < height; ++i) {
      const int64_t used = i < count && rows[i] >= 0 ? inside : 0;
      if (used) load_row(chunk[i], data + rows[i] + f * stride, stride, used);
      for (int64_t c = used; c < wide; ++c) chunk[i][c] = 0;
    }
    for (int64_t c = 0; c < wide; ++c, to += height)
      for (int64_t i = 0; i < height; ++i) to[i] = chunk[i][c];
  }
}

// ---- Microkernels: R rows x V vectors of output features, sums in registers.

// Rows of the panel of a group, of which `left` are there.
SBNET_INLINE int64_t group_height(int64_t left) { return left > 4 ? kGroup : left > 1 ? 4 : 1; }

struct Entries {
  int64_t first[kMatmulDepth / 8];   // feature of an input block
  const float* w[kMatmulDepth / 8];  // its weights, rows block_size apart
  int64_t depth[kMatmulDepth / 8];   // features of the block that there are: padding is never read
  int64_t count;
};

template <int R, int V>
static __attribute__((noinline)) void add_entries(const Entries& entries, const float* panel, int64_t size, float* sums,
                                                  bool first) {
  Vec sum[R][V];
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  for (int64_t e = 0; e < entries.count; ++e) {
    const float *x = panel + entries.first[e] * R, *w = entries.w[e];
    for (int64_t c = 0; c < entries.depth[e]; ++c, x += R, w += size) {
      Vec weight[V];
      SBNET_UNROLL for (int v = 0; v < V; ++v) weight[v] = load(w + v * kLanes);
      SBNET_UNROLL for (int i = 0; i < R; ++i) {
        const Vec input = splat(x[i]);
        SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] += input * weight[v];
      }
    }
  }
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + (i * V + v) * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

template <class T>
static void load_bias(const BlocksparseMatmulParams& p, int64_t first, int64_t count, float* bias) {
  if (!p.bias)
    __builtin_memset(bias, 0, count * 4);
  else if (p.bias_dtype == DType::kF32)
    load_row(bias, static_cast<const float*>(p.bias) + first, 1, count);
  else
    load_row(bias, static_cast<const T*>(p.bias) + first, 1, count);
}

// y = activation(sums + bias) for `rows` rows of sums [R][V * kLanes].
template <class T>
static void finish(const BlocksparseMatmulParams& p, const int64_t* rows, int64_t count, int64_t k, int64_t width,
                   int64_t stride, const float* bias, float* sums) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = sums + i * stride;
    for (int64_t v = 0; v < stride; v += kLanes)
      store(row + v, activate(p.activation, p.activation_param, load(row + v) + load(bias + v)));
    if (rows[i] >= 0) store_row(static_cast<T*>(p.y.data) + rows[i] + k * p.y.stride[1], p.y.stride[1], row, width);
  }
}

// One panel of output features for all rows of the tile. A run of entries serves all rows before the next one comes:
// blocks of one column may lie far apart, in the same sets of a cache, which would not hold a whole column of them.
template <class T, int V>
static void multiply_panel(const BlocksparseMatmulParams& p, const MatmulTask& task, int64_t out, int64_t column,
                           int64_t begin, int64_t end) {
  constexpr int64_t kWidth = V * kLanes;
  const int64_t size = p.layout.shape.block_size, features = task.in_blocks * size, k = out * size + column;
  const int64_t width = smaller(kWidth, task.out_features - k);
  if (width <= 0) return;
  alignas(64) float bias[kWidth], sums[(kMatmulRows + kGroup) * kWidth];
  __builtin_memset(bias, 0, sizeof(bias));
  load_bias<T>(p, k, width, bias);
  bool first = true;
  Entries entries;
  entries.count = 0;
  for (int64_t i = begin; i <= end; ++i) {
    int64_t in, block;
    if (i < end && entry_at(p, task, i, &in, &block)) {
      entries.first[entries.count] = in * size;
      entries.depth[entries.count] = smaller(size, task.in_features - in * size);
      entries.w[entries.count++] = task.weight + block * size * size + column;
    }
    if (i < end && (entries.count + 1) * size <= kMatmulDepth) continue;
    if (i == end && !entries.count && !first) break;
    for (int64_t r = 0; r < task.rows; r += kGroup) {
      const int64_t height = group_height(task.rows - r);
      const float* panel = task.x + r * features;
      if (height == kGroup)
        add_entries<kGroup, V>(entries, panel, size, sums + r * kWidth, first);
      else if (height == 4)
        add_entries<4, V>(entries, panel, size, sums + r * kWidth, first);
      else
        add_entries<1, V>(entries, panel, size, sums + r * kWidth, first);
    }
    first = false;
    entries.count = 0;
  }
  finish<T>(p, task.y_rows, task.rows, k, width, kWidth, bias, sums);
}

template <class T>
static void multiply_of(const BlocksparseMatmulParams& p, const MatmulTask& task) {
  const int64_t size = p.layout.shape.block_size, features = task.in_blocks * size;
  for (int64_t r = 0; r < task.rows; r += kGroup)
    pack_panel<T>(p.x, task.x_rows + r, smaller(kGroup, task.rows - r), group_height(task.rows - r), features,
                  task.x + r * features);
  for (int64_t out = task.first_block; out < task.end_block; ++out) {
    const int64_t blocks = p.layout.shape.blocks;
    const int64_t begin = larger(0, smaller(task.start[out], blocks));
    const int64_t end = larger(begin, smaller(task.start[out + 1], blocks));
    if (size == kLanes)
      multiply_panel<T, 1>(p, task, out, 0, begin, end);
    else
      for (int64_t column = 0; column < size; column += 2 * kLanes)
        multiply_panel<T, 2>(p, task, out, column, begin, end);
  }
}

// ---- Weight gradient

// sums[c][k] += x[row][c] dy[row][k] over `rows` rows, for kSquare features c and V vectors of k.
template <int V>
static __attribute__((noinline)) void add_rows(const float* x, const float* dy, int64_t rows, int64_t size, float* sums,
                                               bool first) {
  Vec sum[kSquare][V];
  SBNET_UNROLL for (int i = 0; i < kSquare; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  for (int64_t r = 0; r < rows; ++r, x += size, dy += size) {
    Vec right[V];
    SBNET_UNROLL for (int v = 0; v < V; ++v) right[v] = load(dy + v * kLanes);
    SBNET_UNROLL for (int i = 0; i < kSquare; ++i) {
      const Vec left = splat(x[i]);
      SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] += left * right[v];
    }
  }
  SBNET_UNROLL for (int i = 0; i < kSquare; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + i * size + v * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

// [rows][size] features from f on, zeros for what is not there.
template <class T>
static void pack_rows(const TensorView& t, const int64_t* rows, int64_t count, int64_t f, int64_t size, float* to) {
  const int64_t inside = larger(0, smaller(size, t.size[1] - f));
  const T* data = static_cast<const T*>(t.data) + f * t.stride[1];
  for (int64_t i = 0; i < count; ++i, to += size) {
    const int64_t used = rows[i] >= 0 ? inside : 0;
    if (used) load_row(to, data + rows[i], t.stride[1], used);
    for (int64_t c = used; c < size; ++c) to[c] = 0;
  }
}

template <class T>
static void weight_grad_of(const BlocksparseWeightGradParams& p, const WeightGradTask& task) {
  const BlockLayoutShape& shape = p.layout.shape;
  const int64_t size = shape.block_size;
  for (int64_t b = task.first_block; b < task.end_block; ++b) {
    const int64_t c = p.layout.coords[2 * b], k = p.layout.coords[2 * b + 1];
    __builtin_memset(task.sums, 0, size * size * 4);
    bool first = true;
    for (int32_t pair = 0; pair < p.pairs; ++pair) {
      const TensorView &x = p.x[pair], &dy = p.dy[pair];
      const bool stored = c >= 0 && c < shape.block_rows && k >= 0 && k < shape.block_columns;
      for (int64_t r = 0; r < (stored ? task.rows[pair] : 0); r += kMatmulDepth) {
        const int64_t count = smaller(kMatmulDepth, task.rows[pair] - r);
        list_rows(x, dy, p.active, r, count, task.x_rows, task.dy_rows);
        pack_rows<T>(x, task.x_rows, count, c * size, size, task.x);
        pack_rows<T>(dy, task.dy_rows, count, k * size, size, task.dy);
        for (int64_t i = 0; i < size; i += kSquare)
          if (size == kLanes)
            add_rows<1>(task.x + i, task.dy, count, size, task.sums + i * size, first);
          else
            for (int64_t j = 0; j < size; j += 2 * kLanes)
              add_rows<2>(task.x + i, task.dy + j, count, size, task.sums + i * size + j, first);
        first = false;
      }
    }
    if (p.dw_dtype == DType::kF32)
      store_row(static_cast<float*>(p.dw) + b * size * size, 1, task.sums, size * size);
    else
      store_row(static_cast<T*>(p.dw) + b * size * size, 1, task.sums, size * size);
  }
}

// ---- The table

static void pack_weights(const BlocksparseMatmulParams& p, float* packed, int64_t begin, int64_t end) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { pack_weights_of<decltype(t)>(p, packed, begin, end); });
}
static void multiply(const BlocksparseMatmulParams& p, const MatmulTask& task) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { multiply_of<decltype(t)>(p, task); });
}
static void weight_grad(const BlocksparseWeightGradParams& p, const WeightGradTask& task) {
  by_dtype<Half, BFloat>(p.x[0].dtype, [&](auto t) { weight_grad_of<decltype(t)>(p, task); });
}

}  // namespace SBNET_ISA
}  // namespace sbnet
