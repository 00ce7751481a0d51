// Convolutions with block-sparse weights by fused multiply-adds of float32 vectors; conv_kernels.h describes the order.
// Included once by each conv_<isa>.cpp, which defines SBNET_ISA, SBNET_LANES, SBNET_VECTORS and SBNET_GROUP first.
#pragma once
#include "cpu/masked/conv_simd.h"
#include "cpu/weights/conv_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

#define SBNET_UNROLL _Pragma("GCC unroll 16")

constexpr int kGroup = SBNET_GROUP;  // positions of a microkernel: with two vectors each they fill the registers
constexpr int kSquare = kGroup == 12 ? 8 : 4;  // input channels of a weight gradient's microkernel
constexpr int kTerms = 64;

// One tap of one block.
struct Term {
  const float* const* source;
  const int32_t* channels;
  int64_t count;
  const float* weight;
};

// ---- Microkernels: R positions x V vectors of output channels, sums in registers.

template <int R, int V>
static __attribute__((noinline)) void add_terms(const Term* terms, int64_t count, float* sums, bool first) {
  Vec sum[R][V];
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  for (int64_t e = 0; e < count; ++e) {
    const float* pixel[R];
    SBNET_UNROLL for (int i = 0; i < R; ++i) pixel[i] = terms[e].source[i];
    const float* w = terms[e].weight;
    for (int64_t c = 0; c < terms[e].count; ++c, w += kConvGroup) {
      const int64_t channel = terms[e].channels[c];
      Vec weight[V];
      SBNET_UNROLL for (int v = 0; v < V; ++v) weight[v] = load(w + v * kLanes);
      SBNET_UNROLL for (int i = 0; i < R; ++i) {
        const Vec input = splat(pixel[i][channel]);
        SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] += input * weight[v];
      }
    }
  }
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + i * kConvGroup + v * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

static void add_terms_of(int64_t rows, int64_t width, const Term* terms, int64_t count, int64_t column, float* sums,
                         bool first) {
  const bool narrow = width - column <= kLanes;
  if (rows == kGroup)
    narrow ? add_terms<kGroup, 1>(terms, count, sums, first) : add_terms<kGroup, 2>(terms, count, sums, first);
  else
    narrow ? add_terms<1, 1>(terms, count, sums, first) : add_terms<1, 2>(terms, count, sums, first);
}

// Sums [rows][kConvGroup] of positions i ... i + rows, for the columns from `column` on.
static void sum_columns(const BlocksparseConvTask& task, int64_t i, int64_t rows, int64_t column, float* sums) {
  Term terms[kTerms];
  int64_t count = 0, depth = 0;
  bool first = true;
  for (int64_t e = 0; e < task.entry_count; ++e)
    for (int64_t t = 0; t < task.taps; ++t) {
      const ConvEntry& entry = task.entries[e];
      const float* const* source = task.source + t * kConvPositions + i;
      bool used = false;
      for (int64_t r = 0; r < rows; ++r) used |= source[r] != task.zeros;
      if (!used) continue;
      terms[count++] = {source, entry.channels, entry.count, entry.weight + t * entry.count * kConvGroup + column};
      depth += entry.count;
      if (count < kTerms && depth < kConvDepth) continue;
      add_terms_of(rows, task.width, terms, count, column, sums + column, first);
      first = false;
      count = depth = 0;
    }
  if (count || first) add_terms_of(rows, task.width, terms, count, column, sums + column, first);
}

template <class T>
static void multiply_of(T* y, Activation activation, float param, const BlocksparseConvTask& task) {
  alignas(64) float sums[kGroup * kConvGroup];
  for (int64_t i = 0; i < task.positions;) {
    const int64_t rows = task.positions - i >= kGroup ? kGroup : 1;
    for (int64_t column = 0; column < task.width; column += 2 * kLanes) sum_columns(task, i, rows, column, sums);
    for (int64_t r = 0; r < rows; ++r, ++i) {
      if (task.out[i] < 0) continue;
      float* row = sums + r * kConvGroup;
      for (int64_t v = 0; v < task.width; v += kLanes)
        store(row + v, activate(activation, param, load(row + v) + load(task.bias + v)));
      for (int64_t k = 0; k < task.width; ++k) narrow(y + task.out[i] + task.channels[k] * task.channel_stride, row[k]);
    }
  }
}

static void multiply(void* y, DType dtype, Activation activation, float param, const BlocksparseConvTask& task) {
  by_dtype<Half, BFloat>(dtype, [&](auto t) { multiply_of(static_cast<decltype(t)*>(y), activation, param, task); });
}

// ---- Weight gradient

// sums[c][k] += left[row][c] right[row][k] over `rows` rows, for kSquare channels c and two vectors of k.
static __attribute__((noinline)) void add_rows(const float* left, int64_t left_width, const float* right,
                                               int64_t right_width, int64_t rows, float* sums, bool first) {
  Vec sum[kSquare][2];
  SBNET_UNROLL for (int i = 0; i < kSquare; ++i) SBNET_UNROLL for (int v = 0; v < 2; ++v) sum[i][v] = Vec{};
  for (int64_t r = 0; r < rows; ++r, left += left_width, right += right_width) {
    Vec other[2];
    SBNET_UNROLL for (int v = 0; v < 2; ++v) other[v] = load(right + v * kLanes);
    SBNET_UNROLL for (int i = 0; i < kSquare; ++i) {
      const Vec one = splat(left[i]);
      SBNET_UNROLL for (int v = 0; v < 2; ++v) sum[i][v] += one * other[v];
    }
  }
  SBNET_UNROLL for (int i = 0; i < kSquare; ++i) SBNET_UNROLL for (int v = 0; v < 2; ++v) {
    float* to = sums + i * right_width + v * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

static void pick_channels(const float* const* pixels, int64_t positions, const int32_t* channels, int64_t count,
                          int64_t width, float* to) {
  for (int64_t i = 0; i < positions; ++i, to += width) {
    for (int64_t c = 0; c < count; ++c) to[c] = pixels[i][channels[c]];
    for (int64_t c = count; c < width; ++c) to[c] = 0;
  }
}

static void weight_grad(const ConvWeightGradTask& task) {
  const int64_t in = (task.in_count + kConvGroup - 1) / kConvGroup * kConvGroup;
  const int64_t out = (task.out_count + kConvGroup - 1) / kConvGroup * kConvGroup;
  pick_channels(task.x, task.positions, task.inputs, task.in_count, in, task.left);
  pick_channels(task.dy, task.positions, task.outputs, task.out_count, out, task.right);
  for (int64_t c = 0; c < task.in_count; c += kSquare)
    for (int64_t k = 0; k < task.out_count; k += 2 * kLanes)
      add_rows(task.left + c, in, task.right + k, out, task.positions, task.sums + c * out + k, task.first);
}

}  // namespace SBNET_ISA
}  // namespace sbnet
