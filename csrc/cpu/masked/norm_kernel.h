// Normalising one row of a block. Included once by each norm_<isa>.cpp; see isa.h for why. Lanes are channels of a
// pixel where those lie next to each other, else pixels; the arithmetic is the same.
#pragma once
#include "cpu/masked/lanes.h"
#include "cpu/masked/norm_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

// The channels of one pixel: step k holds channels k * kLanes ... of which the last may be missing.
template <class T>
struct PixelLanes {
  const T* x;
  T* y;
  int64_t x_step, y_step, channels;

  int64_t steps() const { return (channels + kLanes - 1) / kLanes; }
  static int64_t left(int64_t channels, int64_t k) { return smaller(kLanes, channels - k * kLanes); }
  // `missing` stands for channels past the last.
  Vec get(int64_t k, Vec missing) const {
    if (x_step == 1 && left(channels, k) == kLanes) return load_lanes(x + k * kLanes);
    float lanes[kLanes];
    store(lanes, missing);
    load_row(lanes, x + k * kLanes * x_step, x_step, left(channels, k));
    return load(lanes);
  }
  void put(int64_t k, Vec v) const {
    if (y_step == 1 && left(channels, k) == kLanes) return store_lanes(y + k * kLanes, v);
    float lanes[kLanes];
    store(lanes, v);
    store_row(y + k * kLanes * y_step, y_step, lanes, left(channels, k));
  }
  Vec number(const float* table, int64_t k) const {
    if (left(channels, k) == kLanes) return load(table + k * kLanes);
    float lanes[kLanes] = {};
    load_row(lanes, table + k * kLanes, 1, left(channels, k));
    return load(lanes);
  }
  static Vec sum(Vec v) {
    float all = 0.0f;
    for (int e = 0; e < kLanes; ++e) all += v[e];
    return splat(all);
  }
  static Vec most(Vec v) {
    float all = v[0];
    for (int e = 1; e < kLanes; ++e) all = v[e] > all ? v[e] : all;
    return splat(all);
  }
};

// One channel of neighbouring pixels a step.
template <class T>
struct ColumnLanes {
  const T* x;
  T* y;
  int64_t x_step, y_step, channels, x_column, y_column, columns;

  int64_t steps() const { return channels; }
  Vec get(int64_t k, Vec) const {
    if (x_column == 1 && columns == kLanes) return load_lanes(x + k * x_step);
    float lanes[kLanes] = {};
    load_row(lanes, x + k * x_step, x_column, columns);
    return load(lanes);
  }
  void put(int64_t k, Vec v) const {
    if (y_column == 1 && columns == kLanes) return store_lanes(y + k * y_step, v);
    float lanes[kLanes];
    store(lanes, v);
    store_row(y + k * y_step, y_column, lanes, columns);
  }
  Vec number(const float* table, int64_t k) const { return splat(table[k]); }
  static Vec sum(Vec v) { return v; }
  static Vec most(Vec v) { return v; }
};

// A sum of up to thousands of numbers, one after the other, keeps what each addition rounds off: its error would grow
// with the root of its length (Kahan, 1965).
struct LongSum {
  Vec value = {}, lost = {};
};
SBNET_INLINE void add_to(LongSum* sum, Vec v) {
  const Vec wanted = v - sum->lost, all = sum->value + wanted;
  sum->lost = (all - sum->value) - wanted;
  sum->value = all;
}

SBNET_INLINE float logarithm(float v) { return __builtin_logf(v); }

template <class Lanes>
SBNET_INLINE void image(const Lanes& at, const float* table) {
  const float *scale = table + at.channels, *shift = scale + at.channels;
  for (int64_t k = 0; k < at.steps(); ++k)
    at.put(k, (at.get(k, Vec{}) - at.number(table, k)) * at.number(scale, k) + at.number(shift, k));
}

template <class Lanes>
SBNET_INLINE void layer(const Lanes& at, const float* table, float eps) {
  const float count = static_cast<float>(at.channels);
  LongSum sum, square;
  for (int64_t k = 0; k < at.steps(); ++k) add_to(&sum, at.get(k, Vec{}));
  const Vec mean = Lanes::sum(sum.value) / count;
  for (int64_t k = 0; k < at.steps(); ++k) {
    const Vec apart = at.get(k, mean) - mean;
    add_to(&square, apart * apart);
  }
  const Vec scale = 1.0f / each(Lanes::sum(square.value) / count + eps, root);
  for (int64_t k = 0; k < at.steps(); ++k)
    at.put(k, (at.get(k, mean) - mean) * scale * at.number(table, k) + at.number(table + at.channels, k));
}

template <class Lanes>
SBNET_INLINE void softmax(const Lanes& at, bool logarithmic) {
  const Vec least = splat(-__builtin_inff());
  Vec most = least, total = {};  // NaN, which is no maximum, makes the total NaN
  for (int64_t k = 0; k < at.steps(); ++k) {
    const Vec v = at.get(k, least);
    most = v > most ? v : most;
  }
  most = Lanes::most(most);
  for (int64_t k = 0; k < at.steps(); ++k) total += exponential(at.get(k, least) - most);
  total = Lanes::sum(total);
  const Vec log_total = logarithmic ? each(total, logarithm) : total;
  for (int64_t k = 0; k < at.steps(); ++k) {
    const Vec v = at.get(k, least) - most;
    at.put(k, logarithmic ? v - log_total : exponential(v) / total);
  }
}

template <class Lanes>
SBNET_INLINE void normalise(const NormParams& p, const float* table, const Lanes& at) {
  if (of_images(p.kind))
    image(at, table);
  else if (p.kind == NormKind::kLayer)
    layer(at, table, p.eps);
  else
    softmax(at, p.kind == NormKind::kLogSoftmax);
}

template <class T>
SBNET_INLINE void norm_row_of(const NormParams& p, const float* table, const BlockRow& row) {
  const TensorView &x = p.x, &y = p.y;
  const T* from = static_cast<const T*>(x.data) + row.n * x.stride[0] + row.row * x.stride[2];
  T* to = static_cast<T*>(y.data) + row.n * y.stride[0] + row.row * y.stride[2];
  if (y.stride[1] <= y.stride[3]) {
    for (int64_t w = row.column; w < row.column_end; ++w)
      normalise(p, table,
                PixelLanes<T>{from + w * x.stride[3], to + w * y.stride[3], x.stride[1], y.stride[1], x.size[1]});
  } else {
    for (int64_t w = row.column; w < row.column_end; w += kLanes)
      normalise(p, table,
                ColumnLanes<T>{from + w * x.stride[3], to + w * y.stride[3], x.stride[1], y.stride[1], x.size[1],
                               x.stride[3], y.stride[3], smaller(kLanes, row.column_end - w)});
  }
}

static void norm_row(const NormParams& p, const float* table, const BlockRow& row) {
  switch (p.x.dtype) {
    case DType::kF32:
      return norm_row_of<float>(p, table, row);
    case DType::kF16:
      return norm_row_of<Half>(p, table, row);
    default:
      return norm_row_of<BFloat>(p, table, row);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
