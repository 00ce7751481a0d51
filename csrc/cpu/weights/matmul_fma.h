// Products with block-sparse weights by fused multiply-adds of float32 vectors; matmul_kernels.h describes the order.
// Included once by matmul_generic.cpp, matmul_avx2.cpp and matmul_avx512.cpp.
#pragma once
#include "cpu/weights/matmul_parts.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int kSquare = kGroup == 12 ? 8 : 4;  // input features of a weight gradient's microkernel

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

// Few rows leave registers for sums of one entry at a time: shorter chains, at no cost, for they wait for weights
// anyway.
template <int R, int V>
static __attribute__((noinline)) void add_entries(const Entries<float>& entries, const float* panel, int64_t size,
                                                  float* sums, bool first) {
  constexpr bool kApart = R <= 4;
  Vec sum[R][V], entry_sum[R][V];
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  for (int64_t e = 0; e < entries.count; ++e) {
    const float *x = panel + entries.first[e] * R, *w = entries.w[e];
    if constexpr (kApart)
      SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) entry_sum[i][v] = Vec{};
    Vec(&chain)[R][V] = kApart ? entry_sum : sum;
    for (int64_t c = 0; c < entries.depth[e]; ++c, x += R, w += size) {
      Vec weight[V];
      SBNET_UNROLL for (int v = 0; v < V; ++v) weight[v] = load(w + v * kLanes);
      SBNET_UNROLL for (int i = 0; i < R; ++i) {
        const Vec input = splat(x[i]);
        SBNET_UNROLL for (int v = 0; v < V; ++v) chain[i][v] += input * weight[v];
      }
    }
    if constexpr (kApart)
      SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] += entry_sum[i][v];
  }
  add_sums(sum, V * kLanes, sums, first);
}

template <class T, int V>
static void multiply_columns(const BlocksparseMatmulParams& p, const MatmulTask& task, int64_t out, int64_t column) {
  const int64_t size = p.layout.shape.block_size, features = task.in_blocks * size;
  multiply_panel<T, V, kMatmulDepth, float>(
      p, task, out, column, column, [&](const Entries<float>& entries, float* sums, bool first) {
        each_group(task.rows, [&](auto rows, int64_t r) {
          add_entries<decltype(rows)::kCount, V>(entries, static_cast<const float*>(task.x) + r * features, size,
                                                 sums + r * V * kLanes, first);
        });
      });
}

template <class T>
static void multiply_of(const BlocksparseMatmulParams& p, const MatmulTask& task) {
  const int64_t size = p.layout.shape.block_size, features = task.in_blocks * size;
  for (int64_t r = 0; r < task.rows; r += kGroup)
    pack_panel<T>(p.x, task.x_rows + r, smaller(kGroup, task.rows - r), group_height(task.rows - r), features,
                  static_cast<float*>(task.x) + r * features);
  for (int64_t out = task.first_block; out < task.end_block; ++out)
    if (size == kLanes)
      multiply_columns<T, 1>(p, task, out, 0);
    else
      for (int64_t column = 0; column < size; column += 2 * kLanes) multiply_columns<T, 2>(p, task, out, column);
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
  add_sums(sum, size, sums, first);
}

template <class T>
static void pack_rows_of(const TensorView& t, const int64_t* rows, int64_t count, int64_t f, int64_t size, float* to) {
  const int64_t inside = larger(0, smaller(size, t.size[1] - f));
  const T* data = static_cast<const T*>(t.data) + f * t.stride[1];
  for (int64_t i = 0; i < count; ++i, to += size) {
    const int64_t used = rows[i] >= 0 ? inside : 0;
    if (used) load_row(to, data + rows[i], t.stride[1], used);
    for (int64_t c = used; c < size; ++c) to[c] = 0;
  }
}

static void weight_grad(const BlocksparseWeightGradParams& p, const WeightGradTask& task) {
  each_block(p, task, [&](const char* x_panel, const char* dy_panel, int64_t size, float* sums) {
    for (int64_t r = 0; r < task.rows; r += kMatmulDepth) {
      const float* x = reinterpret_cast<const float*>(x_panel) + r * size;
      const float* dy = reinterpret_cast<const float*>(dy_panel) + r * size;
      const int64_t count = smaller(kMatmulDepth, task.rows - r);
      const bool first = task.first && !r;
      for (int64_t i = 0; i < size; i += kSquare)
        if (size == kLanes)
          add_rows<1>(x + i, dy, count, size, sums + i * size, first);
        else
          for (int64_t j = 0; j < size; j += 2 * kLanes)
            add_rows<2>(x + i, dy + j, count, size, sums + i * size + j, first);
    }
  });
}

// ---- The table

static void pack_weights(const BlocksparseMatmulParams& p, void* packed, int64_t begin, int64_t end) {
  by_dtype<Half, BFloat>(p.x.dtype,
                         [&](auto t) { pack_weights_of<decltype(t)>(p, static_cast<float*>(packed), begin, end); });
}
static void multiply(const BlocksparseMatmulParams& p, const MatmulTask& task) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { multiply_of<decltype(t)>(p, task); });
}
static void pack_rows(const TensorView& t, const int64_t* rows, int64_t count, int64_t feature, int64_t size, bool,
                      void* to) {
  by_dtype<Half, BFloat>(t.dtype, [&](auto element) {
    pack_rows_of<decltype(element)>(t, rows, count, feature, size, static_cast<float*>(to));
  });
}

}  // namespace SBNET_ISA
}  // namespace sbnet
