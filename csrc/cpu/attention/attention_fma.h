// Block-sparse attention by fused multiply-adds of float32 vectors; attention_kernels.h describes the order. Included
// once by each attention_<isa>.cpp, which defines SBNET_ISA, SBNET_LANES, SBNET_VECTORS and SBNET_GROUP first.
#pragma once
#include "cpu/attention/attention_kernels.h"
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

#define SBNET_UNROLL _Pragma("GCC unroll 16")

constexpr int kGroup = SBNET_GROUP;  // rows of a microkernel, two vectors each
constexpr int64_t kWidth = 2 * kLanes, kStay = kAttentionLanes;
constexpr int64_t kPart = 32;  // of a dot product, summed apart: sums of 64 in a row can lose thrice what PyTorch's do
static_assert(kStay % kWidth == 0 && kStay % kGroup == 0 && 8 % kGroup == 0, "microkernels fill the lanes and rows");

// ---- Packing

template <class T>
static void pack_rows_of(const void* data, int64_t stride, const int32_t* at, int64_t count, int64_t dim,
                         int64_t padded, float* to) {
  const int64_t rows = (count + 7) / 8 * 8;
  for (int64_t i = 0; i < rows; ++i, to += padded) {
    const int64_t used = i < count ? dim : 0;
    if (used) load_row(to, static_cast<const T*>(data) + at[i] * stride, 1, used);
    for (int64_t d = used; d < padded; ++d) to[d] = 0;
  }
}

template <class T>
static void pack_lanes_of(const void* data, int64_t stride, int64_t count, int64_t dim, float* to) {
  alignas(64) float chunk[8];
  for (int64_t l = 0; l < kStay; ++l)
    for (int64_t d = 0; d < dim; d += 8) {
      if (l < count) widen8(chunk, static_cast<const T*>(data) + l * stride + d);
      for (int64_t i = 0; i < 8; ++i) to[(d + i) * kStay + l] = l < count ? chunk[i] : 0;
    }
}

template <class T>
static void store_lanes_of(void* data, int64_t stride, int64_t count, int64_t dim, int64_t padded, const float* factors,
                           const float* sums) {
  alignas(64) float chunk[8];
  for (int64_t l = 0; l < count; ++l)
    for (int64_t d = 0; d < dim; d += 8) {
      for (int64_t i = 0; i < 8; ++i) chunk[i] = sums[l * padded + d + i] * factors[l];
      narrow8(static_cast<T*>(data) + l * stride + d, chunk);
    }
}

// In the order of multiply(), so that a query's only key gets a gradient of exactly 0.
template <class T>
static float dot_of(const void* a, const void* b, int64_t dim) {
  alignas(64) float left[8], right[8], sum = 0, part = 0;
  for (int64_t d = 0; d < dim; d += 8) {
    if (d % kPart == 0) sum += part, part = 0;
    widen8(left, static_cast<const T*>(a) + d);
    widen8(right, static_cast<const T*>(b) + d);
    for (int64_t i = 0; i < 8; ++i) part += left[i] * right[i];
  }
  return sum + part;
}

// ---- Products

static void multiply(const float* rows, int64_t count, const float* lanes, int64_t dim, int64_t padded, float* to) {
  for (int64_t r = 0; r < count; r += kGroup)
    for (int64_t l = 0; l < kStay; l += kWidth) {
      const float *a = rows + r * padded, *b = lanes + l;
      for (int64_t d0 = 0; d0 < dim; d0 += kPart) {
        Vec sum[kGroup][2];
        SBNET_UNROLL for (int i = 0; i < kGroup; ++i) sum[i][0] = sum[i][1] = Vec{};
        const int64_t end = d0 + kPart < dim ? d0 + kPart : dim;
        for (int64_t d = d0; d < end; ++d, b += kStay) {
          const Vec right[2] = {load(b), load(b + kLanes)};
          SBNET_UNROLL for (int i = 0; i < kGroup; ++i) {
            const Vec left = splat(a[i * padded + d]);
            SBNET_UNROLL for (int v = 0; v < 2; ++v) sum[i][v] += left * right[v];
          }
        }
        SBNET_UNROLL for (int i = 0; i < kGroup; ++i) SBNET_UNROLL for (int v = 0; v < 2; ++v) {
          float* at = to + (r + i) * kStay + l + v * kLanes;
          store(at, d0 ? load(at) + sum[i][v] : sum[i][v]);
        }
      }
    }
}

static void accumulate(const float* weights, const float* rows, int64_t count, int64_t lanes, int64_t padded,
                       float* sums) {
  for (int64_t l = 0; l < lanes; l += kGroup)
    for (int64_t d = 0; d < padded; d += kWidth) {
      Vec sum[kGroup][2];
      SBNET_UNROLL for (int i = 0; i < kGroup; ++i) sum[i][0] = sum[i][1] = Vec{};
      const float *a = weights + l, *b = rows + d;
      for (int64_t r = 0; r < count; ++r, a += kStay, b += padded) {
        const Vec right[2] = {load(b), load(b + kLanes)};
        SBNET_UNROLL for (int i = 0; i < kGroup; ++i) {
          const Vec left = splat(a[i]);
          SBNET_UNROLL for (int v = 0; v < 2; ++v) sum[i][v] += left * right[v];
        }
      }
      SBNET_UNROLL for (int i = 0; i < kGroup; ++i) SBNET_UNROLL for (int v = 0; v < 2; ++v) {
        float* at = sums + (l + i) * padded + d + v * kLanes;
        store(at, load(at) + sum[i][v]);
      }
    }
}

// ---- Softmax

// -1 where the bit of a lane is set, from lane `first` on.
SBNET_INLINE IntVec lane_bits(uint32_t bits, int64_t first) {
  IntVec masks;
  SBNET_UNROLL for (int i = 0; i < kLanes; ++i) masks[i] = 1 << i;
  const IntVec word = static_cast<int32_t>(bits >> first) - IntVec{};
  return (word & masks) != 0;
}
SBNET_INLINE Vec where(IntVec mask, Vec a, Vec b) { return mask ? a : b; }

static void softmax(const AttentionStep& step, float scale, int64_t lanes, int64_t padded, float* scores,
                    float* largest, float* total, float* sums) {
  const Vec lowest = splat(-__builtin_inff()), zero = Vec{};
  alignas(64) float shrink[kStay];
  for (int64_t l = 0; l < kStay; l += kLanes) {
    const Vec before = load(largest + l);
    Vec top = before;
    for (int64_t i = 0; i < step.count; ++i) {
      float* at = scores + i * kStay + l;
      Vec s = load(at) * scale;
      if (step.masked) s = where(lane_bits(step.visible[i], l), s, lowest);
      store(at, s);
      top = s > top ? s : top;
    }
    const Vec base = where(top == lowest, zero, top);
    const Vec factor = where(before == lowest, zero, exponential(before - base));
    Vec added = zero;
    for (int64_t i = 0; i < step.count; ++i) {
      float* at = scores + i * kStay + l;
      const Vec s = load(at);
      Vec e = where(s == lowest, zero, exponential(s - base));
      added += e;
      if (step.drops) e = where(lane_bits(step.kept[i], l), e, zero);
      store(at, e);
    }
    store(largest + l, top);
    store(total + l, load(total + l) * factor + added);
    store(shrink + l, factor);
  }
  for (int64_t l = 0; l < lanes; ++l)
    if (shrink[l] != 1.0f)
      for (int64_t d = 0; d < padded; d += kLanes) {
        float* at = sums + l * padded + d;
        store(at, load(at) * shrink[l]);
      }
}

static void softmax_grad(const AttentionStep& step, float scale, float keep, bool queries_are_lanes,
                         const AttentionRow* queries, float* scores, float* grads) {
  const Vec zero = Vec{};
  for (int64_t l = 0; l < kStay; l += kLanes) {
    Vec largest = zero, factor = zero, delta = zero;
    if (queries_are_lanes) SBNET_UNROLL for (int i = 0; i < kLanes; ++i) {
        largest[i] = queries[l + i].largest;
        factor[i] = queries[l + i].factor;
        delta[i] = queries[l + i].delta;
      }
    for (int64_t i = 0; i < step.count; ++i) {
      if (!queries_are_lanes)
        largest = splat(queries[i].largest), factor = splat(queries[i].factor), delta = splat(queries[i].delta);
      float *score = scores + i * kStay + l, *grad = grads + i * kStay + l;
      Vec weight = exponential(load(score) * scale - largest) * factor, dropped = weight, of_weight = load(grad);
      if (step.drops) {
        const IntVec kept = lane_bits(step.kept[i], l);
        dropped = where(kept, weight * keep, zero);
        of_weight = where(kept, of_weight * keep, zero);
      }
      Vec of_score = weight * (of_weight - delta);
      if (step.masked) {
        const IntVec visible = lane_bits(step.visible[i], l);
        dropped = where(visible, dropped, zero);
        of_score = where(visible, of_score, zero);
      }
      store(score, dropped);
      store(grad, of_score);
    }
  }
}

// ---- The table

static void pack_rows(DType dtype, const void* data, int64_t stride, const int32_t* at, int64_t count, int64_t dim,
                      int64_t padded, float* to) {
  by_dtype<Half, BFloat>(dtype, [&](auto t) { pack_rows_of<decltype(t)>(data, stride, at, count, dim, padded, to); });
}
static void pack_lanes(DType dtype, const void* data, int64_t stride, int64_t count, int64_t dim, float* to) {
  by_dtype<Half, BFloat>(dtype, [&](auto t) { pack_lanes_of<decltype(t)>(data, stride, count, dim, to); });
}
static void store_lanes(DType dtype, void* data, int64_t stride, int64_t count, int64_t dim, int64_t padded,
                        const float* factors, const float* sums) {
  by_dtype<Half, BFloat>(dtype,
                         [&](auto t) { store_lanes_of<decltype(t)>(data, stride, count, dim, padded, factors, sums); });
}
static float dot(DType dtype, const void* a, const void* b, int64_t dim) {
  return by_dtype<Half, BFloat>(dtype, [&](auto t) { return dot_of<decltype(t)>(a, b, dim); });
}

constexpr AttentionKernels kTable = {kWidth,  pack_rows,    pack_lanes,  multiply, accumulate,
                                     softmax, softmax_grad, store_lanes, dot};

}  // namespace SBNET_ISA
}  // namespace sbnet
