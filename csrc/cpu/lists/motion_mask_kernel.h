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
typedef double Wide __attribute__((vector_size(kLanes * 8)));

static inline Vec load(const float* at) { return *reinterpret_cast<const UnalignedVec*>(at); }
static inline void store(float* at, Vec v) { *reinterpret_cast<UnalignedVec*>(at) = v; }

// Numbers of a row of which every `count`, `stride` apart, and then every `rest` of another row are summed.
struct Sums {
  const float* at;
  int64_t stride, count;
  const float* more;
  int64_t rest;
};

// out[x] = the sum of those from at[x] and more[x] on, of so many vectors of x side by side.
template <int kSide>
static inline void sum_vectors(const Sums& s, int64_t x, float* out) {
  Vec sums[kSide] = {};
  for (int64_t k = 0; k < s.count; ++k)
    for (int v = 0; v < kSide; ++v) sums[v] += load(s.at + k * s.stride + x + v * kLanes);
  for (int64_t k = 0; k < s.rest; ++k)
    for (int v = 0; v < kSide; ++v) sums[v] += load(s.more + k + x + v * kLanes);
  for (int v = 0; v < kSide; ++v) store(out + x + v * kLanes, sums[v]);
}

static inline void sum_apart(const Sums& s, int64_t length, float* out) {
  // The last vectors overlap those before them: sums of one number after the other would take most of the time.
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  if (length >= kStep) {
    for (int64_t x = 0; x < length; x += kStep) sum_vectors<kVecs>(s, least(x, length - kStep), out);
  } else if (length >= kLanes) {
    for (int64_t x = 0; x < length; x += kLanes) sum_vectors<1>(s, least(x, length - kLanes), out);
  } else {
    for (int64_t x = 0; x < length; ++x) {
      float sum = 0;
      for (int64_t k = 0; k < s.count; ++k) sum += s.at[k * s.stride + x];
      for (int64_t k = 0; k < s.rest; ++k) sum += s.more[k + x];
      out[x] = sum;
    }
  }
}

// out[x] = the sum of the `count` numbers from at[x] on: of a wide box, by sums of kFew of them, so that a pixel of 31
// takes 12 additions.
static inline void sum_beside(const float* at, int64_t count, int64_t length, float* out) {
  constexpr int64_t kFew = 5;
  if (count <= 2 * kFew) return sum_apart({at, 1, count, nullptr, 0}, length, out);
  float few[kChunk + kMostSmooth];
  sum_apart({at, 1, kFew, nullptr, 0}, length + count - kFew, few);
  const int64_t rest = count % kFew;
  sum_apart({few, kFew, count / kFew, at + count - rest, rest}, length, out);
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
                    float* out) {
  const int64_t height = p.frame.size[2], width = p.frame.size[3], reach = p.smooth / 2;
  const int64_t top = y > reach ? y - reach : 0, bottom = y + reach < height ? y + reach : height - 1;
  float column[kChunk + kMostSmooth];  // sums of the box's rows, from column x0 - reach on; none beside the frame
  const int64_t begin = x0 - reach, end = x0 + count + reach;
  const int64_t first = begin > 0 ? begin : 0, last = end < width ? end : width;
  for (int64_t x = begin; x < first; ++x) column[x - begin] = 0;
  for (int64_t x = last; x < end; ++x) column[x - begin] = 0;
  const int64_t rows = bottom - top + 1;
  sum_apart({image + (top - start) * width + first, width, rows, nullptr, 0}, last - first, column + (first - begin));
  sum_beside(column, p.smooth, count, out);
  const float of_a_row = static_cast<float>(rows) * brightness_divisor(p);
  const auto divide = [&](int64_t x) {  // of a box that may lie across the border
    const int64_t left = x0 + x > reach ? x0 + x - reach : 0;
    const int64_t right = x0 + x + reach < width ? x0 + x + reach : width - 1;
    out[x] /= static_cast<float>(right - left + 1) * of_a_row;
  };
  const int64_t whole = reach - x0 < count ? reach - x0 : count;  // the first column whose box is
  const int64_t across = width - reach - x0 < count ? width - reach - x0 : count;
  int64_t x = 0;
  for (; x < whole; ++x) divide(x);
  const float divisor = static_cast<float>(p.smooth) * of_a_row;
  for (; x + kLanes <= across; x += kLanes) store(out + x, load(out + x) / divisor);
  for (; x < count; ++x) divide(x);
}

// Mask and next background of columns of an ordinary frame; sums[] gather the differences. `next` may be the
// background.
static void follow(const MotionMaskParams& p, const float* now, const float* background, int64_t count, uint8_t* mask,
                   float* next, Vec* sums) {
  const float threshold = p.threshold, rate = p.rate, rest = 1.0f - rate;
  const bool slow = rate < 0.5f;
  const auto changes = [&](int64_t x) {
    const Vec v = load(now + x), before = load(background + x), apart = v - before;
    store(next + x, slow ? before + rate * apart : v - apart * rest);
    return apart < 0 ? -apart : apart;
  };
  int64_t x = 0;
  for (; x + kStep <= count; x += kStep) {
    float change[kStep];
    for (int v = 0; v < kVecs; ++v) {
      const Vec one = changes(x + v * kLanes);
      store(change + v * kLanes, one);
      sums[v] += one;
    }
    for (int k = 0; k < kStep; ++k) mask[x + k] = change[k] > threshold;
  }
  for (; x + kLanes <= count; x += kLanes) {
    const Vec one = changes(x);
    for (int k = 0; k < kLanes; ++k) mask[x + k] = one[k] > threshold;
    sums[x % kStep / kLanes] += one;
  }
  for (; x < count; ++x) {
    const float before = background[x], change = __builtin_fabsf(now[x] - before);
    next[x] = followed(before, now[x], rate);
    mask[x] = change > threshold;
    sums[x % kStep / kLanes][x % kLanes] += change;
  }
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
  Wide lanes = {};
  for (const Vec& one : sums) lanes += __builtin_convertvector(one, Wide);
  double sum = 0;
  for (int k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum;
}

static constexpr MotionKernels kMotionKernels = {channel_sums, motion_row};

}  // namespace SBNET_ISA
}  // namespace sbnet
