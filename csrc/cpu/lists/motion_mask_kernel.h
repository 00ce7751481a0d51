// Rows of motion_mask, compiled once an instruction set (SBNET_ISA is its namespace); see cpu/simd/isa.h for why all is
// static. Sums over boxes stay in registers; other loops are plain ones over rows that do not alias, which compilers
// turn into vectors.
#pragma once
#include "cpu/lists/motion_mask_kernels.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace SBNET_ISA {

#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kVecs = 8, kStep = kLanes * kVecs;  // columns that are summed side by side
constexpr int kChunk = 256;                       // columns that are averaged at once

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

static inline Vec load(const float* at) { return *reinterpret_cast<const UnalignedVec*>(at); }
static inline void store(float* at, Vec v) { *reinterpret_cast<UnalignedVec*>(at) = v; }

// out[x] = the sum of `count` numbers from at[x] on, `stride` apart, and of `rest` numbers from more[x] on.
template <bool kDivided>
static inline void sum_apart(const float* at, int64_t stride, int64_t count, int64_t length, float* out,
                             float divisor = 1, const float* more = nullptr, int64_t rest = 0) {
  int64_t x = 0;
  for (; x + kStep <= length; x += kStep) {
    Vec sums[kVecs] = {};
    for (int64_t k = 0; k < count; ++k)
      for (int v = 0; v < kVecs; ++v) sums[v] += load(at + k * stride + x + v * kLanes);
    for (int64_t k = 0; k < rest; ++k)
      for (int v = 0; v < kVecs; ++v) sums[v] += load(more + k + x + v * kLanes);
    for (int v = 0; v < kVecs; ++v) store(out + x + v * kLanes, kDivided ? sums[v] / divisor : sums[v]);
  }
  for (; x + kLanes <= length; x += kLanes) {
    Vec sum = {};
    for (int64_t k = 0; k < count; ++k) sum += load(at + k * stride + x);
    for (int64_t k = 0; k < rest; ++k) sum += load(more + k + x);
    store(out + x, kDivided ? sum / divisor : sum);
  }
  for (; x < length; ++x) {
    float sum = 0;
    for (int64_t k = 0; k < count; ++k) sum += at[k * stride + x];
    for (int64_t k = 0; k < rest; ++k) sum += more[k + x];
    out[x] = kDivided ? sum / divisor : sum;
  }
}

// out[x] = the sum of the `count` numbers from at[x] on, divided: of a wide box, by sums of kFew of them, so that a
// pixel of 31 takes 12 additions.
static inline void sum_beside(const float* at, int64_t count, int64_t length, float* out, float divisor) {
  constexpr int64_t kFew = 5;
  if (count <= 2 * kFew) return sum_apart<true>(at, 1, count, length, out, divisor);
  float few[kChunk + kMostSmooth];
  sum_apart<false>(at, 1, kFew, length + count - kFew, few);
  const int64_t rest = count % kFew;
  sum_apart<true>(few, kFew, count / kFew, length, out, divisor, at + count - rest, rest);
}

static inline float value_of(uint8_t v) { return v; }
template <class T>
static inline float value_of(T v) {
  return to_float(v);
}

template <class T>
static void sum_channels(const TensorView& f, const T* at, float* __restrict out) {
  const int64_t channels = f.size[1], width = f.size[3];
  if (f.stride[1] == 1 && f.stride[3] == 3 && channels == 3) {
    for (int64_t x = 0; x < width; ++x)
      out[x] = value_of(at[3 * x]) + value_of(at[3 * x + 1]) + value_of(at[3 * x + 2]);
    return;
  }
  for (int64_t x = 0; x < width; ++x) out[x] = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const T* plane = at + c * f.stride[1];
    if (f.stride[3] == 1)
      for (int64_t x = 0; x < width; ++x) out[x] += value_of(plane[x]);
    else
      for (int64_t x = 0; x < width; ++x) out[x] += value_of(plane[x * f.stride[3]]);
  }
}

static void channel_sums(const MotionMaskParams& p, int64_t n, int64_t y, float* __restrict out) {
  const TensorView& f = p.frame;
  const int64_t at = n * f.stride[0] + y * f.stride[2];
  switch (f.dtype) {
    case DType::kU8:
      sum_channels(f, static_cast<const uint8_t*>(f.data) + at, out);
      break;
    case DType::kF16:
      sum_channels(f, static_cast<const Half*>(f.data) + at, out);
      break;
    case DType::kBF16:
      sum_channels(f, static_cast<const BFloat16*>(f.data) + at, out);
      break;
    default:
      sum_channels(f, static_cast<const float*>(f.data) + at, out);
      break;
  }
}

// Columns x0 ... x0 + count of row y, each the mean brightness of its box inside the frame, of whose rows from `start`
// on the sums of channels are given.
static void average(const MotionMaskParams& p, const float* image, int64_t start, int64_t y, int64_t x0, int64_t count,
                    float* __restrict out) {
  const int64_t height = p.frame.size[2], width = p.frame.size[3], reach = p.smooth / 2;
  const int64_t top = y > reach ? y - reach : 0, bottom = y + reach < height ? y + reach : height - 1;
  float column[kChunk + kMostSmooth] = {};  // sums of the box's rows, from column x0 - reach on
  const int64_t first = x0 > reach ? x0 - reach : 0;
  const int64_t last = x0 + count + reach < width ? x0 + count + reach : width;
  const int64_t rows = bottom - top + 1;
  const float of_a_row = static_cast<float>(rows) * brightness_divisor(p);
  sum_apart<false>(image + (top - start) * width + first, width, rows, last - first, column + (first - (x0 - reach)));
  if (x0 >= reach && x0 + count + reach <= width) {
    sum_beside(column, p.smooth, count, out, static_cast<float>(p.smooth) * of_a_row);
    return;
  }
  sum_beside(column, p.smooth, count, out, 1);
  for (int64_t x = 0; x < count; ++x) {
    const int64_t left = x0 + x > reach ? x0 + x - reach : 0;
    const int64_t right = x0 + x + reach < width ? x0 + x + reach : width - 1;
    out[x] /= static_cast<float>(right - left + 1) * of_a_row;
  }
}

// Mask and next background of columns of an ordinary frame; sums[] gather the differences.
static void follow(const MotionMaskParams& p, const float* now, const float* background, int64_t count,
                   uint8_t* __restrict mask, float* next, Vec* sums) {
  const float threshold = p.threshold, rate = p.rate;
  float before[kChunk], change[kChunk] = {};  // copies: `next` may be the background
  for (int64_t x = 0; x < count; ++x) before[x] = background[x];
  float* __restrict to = next;
  for (int64_t x = 0; x < count; ++x) to[x] = followed(before[x], now[x], rate);
  for (int64_t x = 0; x < count; ++x) change[x] = __builtin_fabsf(now[x] - before[x]);
  for (int64_t x = 0; x < count; ++x) mask[x] = change[x] > threshold;
  for (int64_t x = 0; x < kChunk; x += kStep)
    for (int v = 0; v < kVecs; ++v) sums[v] += load(change + x + v * kLanes);
}

static double motion_row(const MotionMaskParams& p, int64_t n, int64_t y, const float* image, int64_t first, bool cut) {
  const int64_t width = p.frame.size[3], at = (n * p.frame.size[2] + y) * width;
  float now[kChunk];
  Vec sums[kVecs] = {};
  for (int64_t x0 = 0; x0 < width; x0 += kChunk) {
    const int64_t count = width - x0 < kChunk ? width - x0 : kChunk;
    average(p, image, first, y, x0, count, now);
    if (cut) {
      for (int64_t x = 0; x < count; ++x) p.mask[at + x0 + x] = 1;
      for (int64_t x = 0; x < count; ++x) p.next[at + x0 + x] = now[x];
    } else {
      follow(p, now, p.background + at + x0, count, p.mask + at + x0, p.next + at + x0, sums);
    }
  }
  double sum = 0;
  for (const Vec& one : sums)
    for (int k = 0; k < kLanes; ++k) sum += one[k];
  return sum;
}

static constexpr MotionKernels kMotionKernels = {channel_sums, motion_row};

}  // namespace SBNET_ISA
}  // namespace sbnet
