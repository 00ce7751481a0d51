// Products with block-sparse weights in pairs of 16-bit elements, whose products are summed in float32. Included once
// by matmul_amx.cpp and matmul_bf16.cpp, which define multiply_rows.
//
// Forward and input gradient: a step is 32 input features, 16 with blocks of 16. Rows of x are panels [group of
// rows][step][row][feature of the step], weights [block][columns of a panel][step][vector][pair of
// features][output][2]: a step's weights for a vector of outputs are a register of AMX, their rows vectors of AVX-512.
//
// Weight gradient: pairs are of rows, [pair of rows][feature][2], and so of x and of dy.
#pragma once
#include "cpu/weights/matmul_parts.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kMostBlock = 128;

SBNET_INLINE int64_t step_features(int64_t size) { return smaller(size, 2 * kLanes); }
SBNET_INLINE int64_t panel_vectors(int64_t size) { return smaller(size / kLanes, 2); }

// ---- Packing

// kLanes elements of two rows, in turn.
template <class T>
SBNET_INLINE void interleave(const T* even_row, const T* odd_row, T* to) {
  const auto widened = [](const T* row) {
    return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
  };
  const __m512i odd = _mm512_maskz_slli_epi32(0xffff, widened(odd_row), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(widened(even_row), odd));
}

// A pair of features of kLanes outputs. Forward: rows of a block are features; transposed: outputs.
template <class T>
SBNET_INLINE void pack_pair(const T* from, int64_t size, bool transposed, T* to) {
  if (!transposed) return interleave(from, from + size, to);
  for (int64_t k = 0; k < kLanes; ++k) __builtin_memcpy(to + 2 * k, from + k * size, 2 * sizeof(T));
}

// `depth`: input features of the block that there are. Behind them packed rows of x hold zeros, and the block anything.
template <class T>
static void pack_block(const T* from, int64_t size, bool transposed, int64_t depth, T* to) {
  const int64_t width = panel_vectors(size) * kLanes;
  for (int64_t column = 0; column < size; column += width)
    for (int64_t c = 0; c < size; c += step_features(size))
      for (int64_t k = column; k < column + width; k += kLanes)
        for (int64_t pair = c; pair < c + step_features(size); pair += 2, to += 2 * kLanes) {
          if (pair < depth)
            pack_pair(transposed ? from + k * size + pair : from + pair * size + k, size, transposed, to);
          else
            __builtin_memset(to, 0, 2 * kLanes * sizeof(T));
          if (pair + 1 == depth)
            for (int64_t i = 0; i < kLanes; ++i) to[2 * i + 1] = T{};
        }
}

template <class T>
static void pack_weights_of(const BlocksparseMatmulParams& p, T* packed, int64_t begin, int64_t end) {
  const BlockLayoutShape& shape = p.layout.shape;
  const int64_t size = shape.block_size, in_features = p.transposed ? shape.out_features : shape.in_features;
  alignas(64) T gated[kMostBlock * kMostBlock];
  for (int64_t b = begin; b < end; ++b) {
    if (!has_gate(p, b)) continue;
    const T* block = static_cast<const T*>(p.weight) + b * size * size;
    const int64_t in = p.layout.coords[2 * b + (p.transposed ? 1 : 0)];
    // In the weights' own dtype, as PyTorch's weight * gate: a product is rounded once.
    if (p.gate && p.gate[b] != 1.0f) {
      float row[kMostBlock];
      for (int64_t i = 0; i < size; ++i) {
        load_row(row, block + i * size, 1, size);
        for (int64_t k = 0; k < size; ++k) row[k] *= p.gate[b];
        store_row(gated + i * size, 1, row, size);
      }
      block = gated;
    }
    pack_block(block, size, p.transposed, smaller(size, in_features - in * size), packed + b * size * size);
  }
}

// `height` rows of the tile as one panel, zeros for rows that are none and for features beyond the last.
template <class T>
static void pack_panel(const TensorView& t, const int64_t* rows, int64_t count, int64_t height, int64_t features,
                       int64_t step, T* to) {
  const T* data = static_cast<const T*>(t.data);
  const int64_t stride = t.stride[1], F = t.size[1];
  for (int64_t f = 0; f < features; f += step, to += height * step) {
    const int64_t inside = larger(0, smaller(step, F - f));
    for (int64_t i = 0; i < height; ++i) {
      const int64_t used = i < count && rows[i] >= 0 ? inside : 0;
      T* row = to + i * step;
      if (used == step && stride == 1) {
        __builtin_memcpy(row, data + rows[i] + f, step * sizeof(T));
        continue;
      }
      for (int64_t c = 0; c < used; ++c) row[c] = data[rows[i] + (f + c) * stride];
      for (int64_t c = used; c < step; ++c) row[c] = T{};
    }
  }
}

// ---- Tiles

// Rows of the panel of a group of a tile of `rows`, of which `left` are there.
SBNET_INLINE int64_t panel_height(int64_t rows, int64_t left);

// Adds the products of `entries` for all rows of the tile to sums [row][V * kLanes]; `features` of a row of x.
template <class T, int V>
static void multiply_rows(const MatmulTask& task, const Entries<T>& entries, int64_t size, int64_t features,
                          float* sums, bool first);

template <class T>
static void multiply_of(const BlocksparseMatmulParams& p, const MatmulTask& task) {
  const int64_t size = p.layout.shape.block_size, features = task.in_blocks * size;
  for (int64_t r = 0; r < task.rows; r += kGroup)
    pack_panel<T>(p.x, task.x_rows + r, smaller(kGroup, task.rows - r), panel_height(task.rows, task.rows - r),
                  features, step_features(size), static_cast<T*>(task.x) + r * features);
  for (int64_t out = task.first_block; out < task.end_block; ++out)
    if (size == kLanes)
      multiply_panel<T, 1, kLongestRun, T>(p, task, out, 0, 0, [&](const auto& entries, float* sums, bool first) {
        multiply_rows<T, 1>(task, entries, size, features, sums, first);
      });
    else
      for (int64_t column = 0; column < size; column += 2 * kLanes)
        multiply_panel<T, 2, kLongestRun, T>(p, task, out, column, column * size,
                                             [&](const auto& entries, float* sums, bool first) {
                                               multiply_rows<T, 2>(task, entries, size, features, sums, first);
                                             });
}

// ---- Weight gradient

// `count` rows, an even number, of a block's features from f on.
template <class T>
static void pack_row_pairs(const TensorView& t, const int64_t* rows, int64_t count, int64_t f, int64_t size, T* to) {
  const int64_t inside = larger(0, smaller(size, t.size[1] - f)), stride = t.stride[1];
  const T* data = static_cast<const T*>(t.data) + f * stride;
  alignas(64) T filled[2][kMostBlock];
  for (int64_t i = 0; i < count; i += 2, to += 2 * size) {
    const T* pair[2];
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t used = rows[i + j] >= 0 ? inside : 0;
      pair[j] = used ? data + rows[i + j] : data;
      if (used == size && stride == 1) continue;
      for (int64_t c = 0; c < used; ++c) filled[j][c] = pair[j][c * stride];
      for (int64_t c = used; c < size; ++c) filled[j][c] = T{};
      pair[j] = filled[j];
    }
    for (int64_t c = 0; c < size; c += kLanes) interleave(pair[0] + c, pair[1] + c, to + 2 * c);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
