// Sums, maxima and moments over the pixels of one block. Included once by each block_fold_<isa>.cpp; see isa.h for why.
// Lanes are channels where those lie next to each other, else columns.
#pragma once
#include "cpu/masked/block_fold_kernels.h"
#include "cpu/masked/lanes.h"

namespace sbnet {
namespace SBNET_ISA {

struct Sum {
  static constexpr float kStart = 0.0f;
  template <class V>
  SBNET_INLINE V add(V a, V b) {
    return a + b;
  }
};
struct Max {
  static constexpr float kStart = -__builtin_inff();
  SBNET_INLINE Vec add(Vec a, Vec b) { return (b > a) | (b != b) ? b : a; }
  SBNET_INLINE float add(float a, float b) { return b > a || b != b ? b : a; }
};

template <class T>
struct Block {
  const T* x;  // channel 0 of its first pixel
  int64_t rows, columns, row_step, column_step, channel_step;
};

// One channel, strided. `change` is applied to each element.
template <class Op, class T, class Change>
SBNET_INLINE float fold_channel(const Block<T>& b, int64_t c, const Change& change) {
  const T* x = b.x + c * b.channel_step;
  float result = Op::kStart;
  const bool runs = b.column_step == 1 && b.columns >= kLanes;
  Vec lanes = splat(Op::kStart);
  for (int64_t r = 0; r < b.rows; ++r) {
    const T* row = x + r * b.row_step;
    int64_t w = 0;
    if (runs)
      for (; w + kLanes <= b.columns; w += kLanes) lanes = Op::add(lanes, change(load_lanes(row + w)));
    for (; w < b.columns; ++w) result = Op::add(result, change(widen(row[w * b.column_step])));
  }
  if (runs)
    for (int e = 0; e < kLanes; ++e) result = Op::add(result, lanes[e]);
  return result;
}

// kVecs vectors of neighbouring channels.
template <class Op, int kVecs, class T, class Change>
SBNET_INLINE void fold_vectors(const Block<T>& b, int64_t c, Vec (&result)[kVecs], const Change& change) {
  for (int v = 0; v < kVecs; ++v) result[v] = splat(Op::kStart);
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t w = 0; w < b.columns; ++w) {
      const T* at = b.x + r * b.row_step + w * b.column_step + c;
      for (int v = 0; v < kVecs; ++v) result[v] = Op::add(result[v], change(load_lanes(at + v * kLanes), v));
    }
}

// ---- sums and maxima: a row by itself, as hundreds of terms added one after another lose more digits than PyTorch's

template <class T>
SBNET_INLINE Block<T> row_of(const Block<T>& b, int64_t r) {
  return {b.x + r * b.row_step, 1, b.columns, b.row_step, b.column_step, b.channel_step};
}

template <class Op, int kVecs, class T>
SBNET_INLINE void merge_vectors(const Block<T>& b, int64_t c, float* values) {
  Vec found[kVecs], of_row[kVecs];
  for (int v = 0; v < kVecs; ++v) found[v] = splat(Op::kStart);
  for (int64_t r = 0; r < b.rows; ++r) {
    fold_vectors<Op>(row_of(b, r), c, of_row, [](Vec x, int) { return x; });
    for (int v = 0; v < kVecs; ++v) found[v] = Op::add(found[v], of_row[v]);
  }
  for (int v = 0; v < kVecs; ++v) {
    float* at = values + c + v * kLanes;
    store(at, Op::add(load(at), found[v]));
  }
}

template <class Op, class T>
SBNET_INLINE void merge_block(const Block<T>& b, int64_t C, float* values) {
  int64_t c = 0;
  if (b.channel_step == 1) {
    for (; c + kVectors * kLanes <= C; c += kVectors * kLanes) merge_vectors<Op, kVectors>(b, c, values);
    for (; c + kLanes <= C; c += kLanes) merge_vectors<Op, 1>(b, c, values);
  }
  for (; c < C; ++c) {
    float found = Op::kStart;
    for (int64_t r = 0; r < b.rows; ++r)
      found = Op::add(found, fold_channel<Op>(row_of(b, r), c, [](auto x) { return x; }));
    values[c] = Op::add(values[c], found);
  }
}

// ---- moments: those of the block about its own mean, merged with those before (Chan, Golub and LeVeque, 1979)

template <class V>
SBNET_INLINE void merge_moments(V* mean, V* square, V block_mean, V block_square, float before, float pixels) {
  const float all = before + pixels;
  const V apart = block_mean - *mean;
  *mean += apart * (pixels / all);
  *square += block_square + apart * apart * (before * pixels / all);
}

template <int kVecs, class T>
SBNET_INLINE void moments_of_vectors(const Block<T>& b, int64_t c, float* values, int64_t C, float before) {
  const float pixels = static_cast<float>(b.rows * b.columns);
  Vec mean[kVecs], square[kVecs];
  fold_vectors<Sum>(b, c, mean, [](Vec x, int) { return x; });
  for (int v = 0; v < kVecs; ++v) mean[v] /= pixels;
  fold_vectors<Sum>(b, c, square, [&](Vec x, int v) { return (x - mean[v]) * (x - mean[v]); });
  for (int v = 0; v < kVecs; ++v) {
    float* at = values + c + v * kLanes;
    Vec old_mean = load(at), old_square = load(at + C);
    merge_moments(&old_mean, &old_square, mean[v], square[v], before, pixels);
    store(at, old_mean);
    store(at + C, old_square);
  }
}

template <class T>
SBNET_INLINE void moments_of_block(const Block<T>& b, int64_t C, float* values, float before) {
  int64_t c = 0;
  if (b.channel_step == 1) {
    for (; c + kVectors * kLanes <= C; c += kVectors * kLanes) moments_of_vectors<kVectors>(b, c, values, C, before);
    for (; c + kLanes <= C; c += kLanes) moments_of_vectors<1>(b, c, values, C, before);
  }
  const float pixels = static_cast<float>(b.rows * b.columns);
  for (; c < C; ++c) {
    const float mean = fold_channel<Sum>(b, c, [](auto x) { return x; }) / pixels;
    const float square = fold_channel<Sum>(b, c, [&](auto x) { return (x - mean) * (x - mean); });
    merge_moments(values + c, values + C + c, mean, square, before, pixels);
  }
}

template <class T>
SBNET_INLINE void fold_rect_of(FoldKind kind, const TensorView& x, int64_t n, const PixelRect& rect, float* values,
                               float count) {
  const T* first = static_cast<const T*>(x.data) + n * x.stride[0] + rect.row * x.stride[2] + rect.column * x.stride[3];
  const Block<T> b = {first,      rect.row_end - rect.row, rect.column_end - rect.column, x.stride[2], x.stride[3],
                      x.stride[1]};
  if (kind == FoldKind::kSum)
    merge_block<Sum>(b, x.size[1], values);
  else if (kind == FoldKind::kMax)
    merge_block<Max>(b, x.size[1], values);
  else
    moments_of_block(b, x.size[1], values, count);
}

static void fold_rect(FoldKind kind, const TensorView& x, int64_t n, const PixelRect& rect, float* values,
                      float count) {
  switch (x.dtype) {
    case DType::kF32:
      return fold_rect_of<float>(kind, x, n, rect, values, count);
    case DType::kF16:
      return fold_rect_of<Half>(kind, x, n, rect, values, count);
    default:
      return fold_rect_of<BFloat>(kind, x, n, rect, values, count);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
