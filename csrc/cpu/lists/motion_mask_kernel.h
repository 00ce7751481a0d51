// Rows of motion_mask, compiled once an instruction set (SBNET_ISA is its namespace); see cpu/simd/isa.h for why all is
// static. Loops are plain ones over rows that do not alias, which compilers turn into vectors.
#pragma once
#include "cpu/lists/motion_mask_kernels.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int kLanes = 16, kChunk = 256;  // sums side by side; columns that are averaged at once

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

static void brightness(const MotionMaskParams& p, int64_t n, int64_t y, float* __restrict out) {
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
  const float divisor = brightness_divisor(p);
  for (int64_t x = 0; x < f.size[3]; ++x) out[x] /= divisor;
}

// Columns x0 ... x0 + count of row y, each the mean of its box inside the frame.
static void average(const MotionMaskParams& p, const float* image, int64_t y, int64_t x0, int64_t count,
                    float* __restrict out) {
  const int64_t height = p.frame.size[2], width = p.frame.size[3], reach = p.smooth / 2;
  const int64_t top = y > reach ? y - reach : 0, bottom = y + reach < height ? y + reach : height - 1;
  float column[kChunk + kMostSmooth] = {};  // sums of the box's rows, from column x0 - reach on
  const int64_t first = x0 > reach ? x0 - reach : 0;
  const int64_t last = x0 + count + reach < width ? x0 + count + reach : width;
  float* __restrict to = column + (first - (x0 - reach));
  for (int64_t r = top; r <= bottom; ++r) {
    const float* __restrict row = image + r * width;
    for (int64_t x = 0; x < last - first; ++x) to[x] += row[first + x];
  }
  for (int64_t x = 0; x < count; ++x) out[x] = 0;
  for (int64_t k = 0; k < p.smooth; ++k)
    for (int64_t x = 0; x < count; ++x) out[x] += column[x + k];
  const float rows = static_cast<float>(bottom - top + 1), whole = rows * static_cast<float>(p.smooth);
  if (x0 >= reach && x0 + count + reach <= width) {
    for (int64_t x = 0; x < count; ++x) out[x] /= whole;
    return;
  }
  for (int64_t x = 0; x < count; ++x) {
    const int64_t left = x0 + x > reach ? x0 + x - reach : 0;
    const int64_t right = x0 + x + reach < width ? x0 + x + reach : width - 1;
    out[x] /= rows * static_cast<float>(right - left + 1);
  }
}

static double motion_row(const MotionMaskParams& p, int64_t n, int64_t y, const float* image, bool cut) {
  const int64_t width = p.frame.size[3], at = (n * p.frame.size[2] + y) * width;
  float now[kChunk], sums[kLanes] = {};
  for (int64_t x0 = 0; x0 < width; x0 += kChunk) {
    const int64_t count = width - x0 < kChunk ? width - x0 : kChunk;
    average(p, image, y, x0, count, now);
    uint8_t* __restrict mask = p.mask + at + x0;
    float* next = p.next + at + x0;
    if (cut) {
      for (int64_t x = 0; x < count; ++x) mask[x] = 1;
      for (int64_t x = 0; x < count; ++x) next[x] = now[x];
      continue;
    }
    const float* background = p.background + at + x0;
    float before[kChunk], change[kChunk] = {};  // copies: `next` may be the background
    for (int64_t x = 0; x < count; ++x) before[x] = background[x];
    for (int64_t x = 0; x < count; ++x) change[x] = __builtin_fabsf(now[x] - before[x]);
    for (int64_t x = 0; x < count; ++x) mask[x] = change[x] > p.threshold;
    for (int64_t x = 0; x < count; ++x) next[x] = followed(before[x], now[x], p.rate);
    for (int64_t x = 0; x < kChunk; x += kLanes)
      for (int k = 0; k < kLanes; ++k) sums[k] += change[x + k];
  }
  double sum = 0;
  for (int k = 0; k < kLanes; ++k) sum += sums[k];
  return sum;
}

static constexpr MotionKernels kMotionKernels = {brightness, motion_row};

}  // namespace SBNET_ISA
}  // namespace sbnet
