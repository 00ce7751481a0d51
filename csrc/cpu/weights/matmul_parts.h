// What products with block-sparse weights have in common, whatever multiplies: runs of entries of the look-up tables,
// and the epilogue.
// Included once by each matmul_<isa>.cpp, which defines SBNET_ISA, SBNET_LANES, SBNET_VECTORS and SBNET_GROUP first.
#pragma once
#include "cpu/masked/conv_simd.h"
#include "cpu/weights/matmul_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

#define SBNET_UNROLL _Pragma("GCC unroll 16")

constexpr int kGroup = SBNET_GROUP;  // rows of a microkernel: with its vectors of outputs they fill the registers

SBNET_INLINE bool has_gate(const BlocksparseMatmulParams& p, int64_t block) { return !p.gate || p.gate[block] != 0; }

// An entry of a look-up table, if it names an input block and a stored block.
SBNET_INLINE bool entry_at(const BlocksparseMatmulParams& p, const MatmulTask& task, int64_t i, int64_t* in,
                           int64_t* block) {
  *in = task.entries[2 * i];
  *block = task.entries[2 * i + 1];
  return *in >= 0 && *in < task.in_blocks && *block >= 0 && *block < p.layout.shape.blocks && has_gate(p, *block);
}

// ---- Microkernels of vectors: groups of kGroup rows, the last of 4 or 1 if so many will do

// Rows of the panel of a group, of which `left` are there.
SBNET_INLINE int64_t group_height(int64_t left) { return left > 4 ? kGroup : left > 1 ? 4 : 1; }

template <int R>
struct GroupRows {
  static constexpr int kCount = R;
};

// add(GroupRows of a group, its first row).
template <class Add>
SBNET_INLINE void each_group(int64_t rows, const Add& add) {
  for (int64_t r = 0; r < rows; r += kGroup) {
    const int64_t height = group_height(rows - r);
    if (height == kGroup)
      add(GroupRows<kGroup>{}, r);
    else if (height == 4)
      add(GroupRows<4>{}, r);
    else
      add(GroupRows<1>{}, r);
  }
}

// Rows of sums, `stride` apart: added, or set if they are the first.
template <int R, int V>
SBNET_INLINE void add_sums(const Vec (&sum)[R][V], int64_t stride, float* sums, bool first) {
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + i * stride + v * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

// ---- Entries

constexpr int64_t kLongestRun = 512;  // features of entries that are multiplied together
constexpr int64_t kLeastBlock = 8;

template <class W>
struct Entries {
  int64_t first[kLongestRun / kLeastBlock];  // feature of an input block
  const W* w[kLongestRun / kLeastBlock];     // its weights, from the panel's first column on
  int64_t depth[kLongestRun / kLeastBlock];  // features of the block that there are: padding is never read
  int64_t count;
};

// ---- Epilogue

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

// One panel of V vectors of output features, from `column` of block `out` on, for all rows of the tile; weights of W
// begin at `column_at` of their block. add(entries, sums, first) adds their products, `first`: sets the sums. A run of
// entries serves all rows before the next one comes: blocks of one column may lie far apart, in the same sets of a
// cache, which would not hold a whole column of them.
template <class T, int V, int64_t kRun, class W, class Add>
static void multiply_panel(const BlocksparseMatmulParams& p, const MatmulTask& task, int64_t out, int64_t column,
                           int64_t column_at, const Add& add) {
  constexpr int64_t kWidth = V * kLanes;
  const int64_t size = p.layout.shape.block_size, blocks = p.layout.shape.blocks, k = out * size + column;
  const int64_t begin = larger(0, smaller(task.start[out], blocks));
  const int64_t end = larger(begin, smaller(task.start[out + 1], blocks));
  const int64_t width = smaller(kWidth, task.out_features - k);
  if (width <= 0) return;
  alignas(64) float bias[kWidth], sums[(kMatmulRows + kGroup) * kWidth];
  __builtin_memset(bias, 0, sizeof(bias));
  load_bias<T>(p, k, width, bias);
  bool first = true;
  Entries<W> entries;
  entries.count = 0;
  for (int64_t i = begin; i <= end; ++i) {
    int64_t in, block;
    if (i < end && entry_at(p, task, i, &in, &block)) {
      entries.first[entries.count] = in * size;
      entries.depth[entries.count] = smaller(size, task.in_features - in * size);
      entries.w[entries.count++] = static_cast<const W*>(task.weight) + block * size * size + column_at;
    }
    if (i < end && (entries.count + 1) * size <= kRun) continue;
    if (i == end && !entries.count && !first) break;
    add(entries, sums, first);
    first = false;
    entries.count = 0;
  }
  finish<T>(p, task.y_rows, task.rows, k, width, kWidth, bias, sums);
}

// ---- Weight gradient

// add(panel of x, panel of dy, block size, sums) adds the products of a block's rows, the first of them with
// task.first; then, behind the last slab of rows, the gradient is written. A block outside the matrix has none.
template <class Add>
SBNET_INLINE void each_block(const BlocksparseWeightGradParams& p, const WeightGradTask& task, const Add& add) {
  const BlockLayoutShape& shape = p.layout.shape;
  const int64_t size = shape.block_size, elements = size * size;
  for (int64_t b = task.first_block; b < task.end_block; ++b) {
    const int64_t c = p.layout.coords[2 * b], k = p.layout.coords[2 * b + 1];
    float* sums = task.sums + (task.sums_of_all ? b * elements : 0);
    if (task.rows && c >= 0 && c < shape.block_rows && k >= 0 && k < shape.block_columns)
      add(task.x + c * task.panel_bytes, task.dy + k * task.panel_bytes, size, sums);
    else if (task.first)
      __builtin_memset(sums, 0, elements * 4);
    if (task.last)
      by_dtype<Half, BFloat>(p.dw_dtype, [&](auto element) {
        store_row(static_cast<decltype(element)*>(p.dw) + b * elements, 1, sums, elements);
      });
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
