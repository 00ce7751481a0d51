// Pooling one row of a block. Included once by each pool_<isa>.cpp; see isa.h for why. Taps are visited row by row, as
// PyTorch does: of equal values the first wins, a NaN wins over all before it, sums are rounded in the same order.
#pragma once
#include "cpu/masked/lanes.h"
#include "cpu/masked/pool_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

// The taps of one output inside the plane: `rows` x `columns` of them, apart by `row_step` and `column_step` elements.
template <class T>
struct PoolWindow {
  const T* x;  // channel 0 of the first of them
  int64_t rows, columns, row_step, column_step;
  float divisor;
};

// Axis d of an output: its first tap inside the plane, and how many there are.
SBNET_INLINE int64_t clip_taps(const PoolParams& p, int d, int64_t begin, int64_t* taps) {
  const int64_t step = p.dilation[d], side = p.x.size[2 + d];
  const int64_t skipped = begin < 0 ? (-begin + step - 1) / step : 0;
  const int64_t first = begin + skipped * step;
  const int64_t inside = first < side ? (side - first + step - 1) / step : 0;
  *taps = larger(smaller(p.kernel[d] - skipped, inside), 0);
  return first;
}

template <class T>
SBNET_INLINE PoolWindow<T> window_of(const PoolParams& p, int64_t n, int64_t row, int64_t column) {
  const int64_t begin[2] = {row * p.stride[0] - p.padding[0], column * p.stride[1] - p.padding[1]};
  PoolWindow<T> w;
  const int64_t top = clip_taps(p, 0, begin[0], &w.rows), left = clip_taps(p, 1, begin[1], &w.columns);
  w.x = static_cast<const T*>(p.x.data) + n * p.x.stride[0] + top * p.x.stride[2] + left * p.x.stride[3];
  w.row_step = p.dilation[0] * p.x.stride[2];
  w.column_step = p.dilation[1] * p.x.stride[3];
  w.divisor =
      p.kind == PoolKind::kMax ? 1.0f : pool_divisor(p, static_cast<int32_t>(begin[0]), static_cast<int32_t>(begin[1]));
  return w;
}

// kVecs vectors of channels of one output.
template <bool kMax, int kVecs, class T>
SBNET_INLINE void pool_vectors(const PoolWindow<T>& w, int64_t channel, T* y) {
  Vec result[kVecs];
  for (int v = 0; v < kVecs; ++v) result[v] = splat(kMax ? -__builtin_inff() : 0.0f);
  for (int64_t r = 0; r < w.rows; ++r)
    for (int64_t s = 0; s < w.columns; ++s) {
      const T* at = w.x + r * w.row_step + s * w.column_step + channel;
      for (int v = 0; v < kVecs; ++v) {
        const Vec tap = load_lanes(at + v * kLanes);
        if (kMax)
          result[v] = (tap > result[v]) | (tap != tap) ? tap : result[v];
        else
          result[v] += tap;
      }
    }
  for (int v = 0; v < kVecs; ++v) store_lanes(y + channel + v * kLanes, kMax ? result[v] : result[v] / w.divisor);
}

template <bool kMax, class T>
SBNET_INLINE T pool_channel(const PoolWindow<T>& w, int64_t channel_offset) {
  float result = kMax ? -__builtin_inff() : 0.0f;
  for (int64_t r = 0; r < w.rows; ++r)
    for (int64_t s = 0; s < w.columns; ++s) {
      const float tap = widen(w.x[r * w.row_step + s * w.column_step + channel_offset]);
      if (!kMax)
        result += tap;
      else if (tap > result || tap != tap)
        result = tap;
    }
  T narrowed;
  narrow(&narrowed, kMax ? result : result / w.divisor);
  return narrowed;
}

template <bool kMax, class T>
SBNET_INLINE void pool_row_of(const PoolParams& p, const BlockRow& row) {
  const int64_t C = p.x.size[1];
  T* y = static_cast<T*>(p.y.data) + row.n * p.y.stride[0] + row.row * p.y.stride[2];
  const bool packed = p.x.stride[1] == 1 && p.y.stride[1] == 1;
  for (int64_t column = row.column; column < row.column_end; ++column) {
    const PoolWindow<T> w = window_of<T>(p, row.n, row.row, column);
    T* to = y + column * p.y.stride[3];
    int64_t c = 0;
    if (packed) {
      for (; c + kVectors * kLanes <= C; c += kVectors * kLanes) pool_vectors<kMax, kVectors>(w, c, to);
      for (; c + kLanes <= C; c += kLanes) pool_vectors<kMax, 1>(w, c, to);
    }
    for (; c < C; ++c) to[c * p.y.stride[1]] = pool_channel<kMax>(w, c * p.x.stride[1]);
  }
}

template <class T>
SBNET_INLINE void pool_row_of(const PoolParams& p, const BlockRow& row) {
  if (p.kind == PoolKind::kMax)
    pool_row_of<true, T>(p, row);
  else
    pool_row_of<false, T>(p, row);
}

static void pool_row(const PoolParams& p, const BlockRow& row) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { pool_row_of<decltype(t)>(p, row); });
}

}  // namespace SBNET_ISA
}  // namespace sbnet
