// Convolutions to few output channels, of packed float32 feature maps, straight from x: heads, 64 channels to 3. Were
// lanes output channels, most would idle; here they are input channels, and a sum's lanes are added up at the end.
// Where padding is read, pixel by pixel over the taps that lie inside. The order of a pixel's sums does not depend on
// the tile. Included once by conv_fma.h.
#pragma once

namespace sbnet {
namespace SBNET_ISA {

// ---- Weights: [tap][input channels in whole vectors][output channel][lane], zeros in the tail lanes.

SBNET_INLINE int64_t whole_vectors(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

static void pack_narrow(const ConvLayout& layout, float* packed) {
  const TensorView& w = layout.weight;
  const int64_t K = layout.group_out, C = layout.group_in, S = w.size[3];
  float* to = packed + layout.narrow_at;
  for (int64_t t = 0; t < layout.taps(); ++t)
    for (int64_t c0 = 0; c0 < C; c0 += kLanes)
      for (int64_t k = 0; k < K; ++k, to += kLanes) {
        const float* from = static_cast<const float*>(w.data) + k * w.stride[0] + c0 * w.stride[1] +
                            t / S * w.stride[2] + t % S * w.stride[3];
        const int64_t count = smaller(kLanes, C - c0);
        load_row(to, from, w.stride[1], count);
        for (int64_t c = count; c < kLanes; ++c) to[c] = 0;
      }
}

// ---- Sums of lanes.

// The first `count` lanes, less than all; zeros in the others, of which nothing is read.
SBNET_INLINE Vec load_first(const float* at, int64_t count) {
#if defined(__AVX512F__) && SBNET_LANES == 16
  return reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), at));
#elif defined(__AVX2__) && SBNET_LANES == 8
  IntVec lanes;
  SBNET_UNROLL for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return reinterpret_cast<Vec>(_mm256_maskload_ps(at, reinterpret_cast<__m256i>(lanes < static_cast<int32_t>(count))));
#else
  Vec found = Vec{};
  for (int i = 0; i < count; ++i) found[i] = at[i];
  return found;
#endif
}

// Lane i: the sum of the lanes of v[i], halves first.
#if defined(__AVX512F__) && SBNET_LANES == 16
template <int kLow, int kHigh>
SBNET_INLINE __m512 add_quarters(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, a, b, kLow), _mm512_maskz_shuffle_f32x4(0xffff, a, b, kHigh));
}
template <int kLow, int kHigh>
SBNET_INLINE __m512 add_lanes_of(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_maskz_shuffle_ps(0xffff, a, b, kLow), _mm512_maskz_shuffle_ps(0xffff, a, b, kHigh));
}
SBNET_INLINE Vec sums_of(const Vec* v) {
  __m512 fours[4];  // of v[i], v[4 + i], v[8 + i], v[12 + i]: four lanes each
  SBNET_UNROLL for (int i = 0; i < 4; ++i) {
    const auto at = [&](int j) { return reinterpret_cast<__m512>(v[4 * j + i]); };
    fours[i] = add_quarters<0x88, 0xdd>(add_quarters<0x44, 0xee>(at(0), at(1)), add_quarters<0x44, 0xee>(at(2), at(3)));
  }
  return reinterpret_cast<Vec>(add_lanes_of<0x88, 0xdd>(add_lanes_of<0x44, 0xee>(fours[0], fours[1]),
                                                        add_lanes_of<0x44, 0xee>(fours[2], fours[3])));
}
#elif defined(__AVX2__) && SBNET_LANES == 8
SBNET_INLINE Vec sums_of(const Vec* v) {
  __m256 fours[2];  // of four vectors: their lower, and their upper lanes
  SBNET_UNROLL for (int i = 0; i < 2; ++i) {
    const auto at = [&](int j) { return reinterpret_cast<__m256>(v[4 * i + j]); };
    fours[i] = _mm256_hadd_ps(_mm256_hadd_ps(at(0), at(1)), _mm256_hadd_ps(at(2), at(3)));
  }
  return reinterpret_cast<Vec>(_mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                                             _mm256_permute2f128_ps(fours[0], fours[1], 0x31)));
}
#else
SBNET_INLINE Vec sums_of(const Vec* v) {
  Vec found;
  for (int i = 0; i < kLanes; ++i) {
    found[i] = 0;
    for (int lane = 0; lane < kLanes; ++lane) found[i] += v[i][lane];
  }
  return found;
}
#endif

// ---- Pixels.

constexpr int kNarrowSums = kLanes == 4 ? 8 : kLanes == 8 ? 12 : 16;  // that registers hold beside inputs, weights
constexpr int kNarrowOutputs = kLanes / 2, kNarrowPixels = 8;
constexpr int kNarrowRoom = (kNarrowSums + kLanes - 1) / kLanes * kLanes;

constexpr int narrow_pixels(int outputs) {
  return kNarrowSums / outputs < kNarrowPixels ? kNarrowSums / outputs : kNarrowPixels;
}

// Taps that are read: their offsets in x, from a pixel's first, and in the packed weights.
struct NarrowTaps {
  int64_t count, channels;
  int64_t input[kMaxAxisTaps * kMaxAxisTaps], weight[kMaxAxisTaps * kMaxAxisTaps];
};

// to: [P][K], in room for whole vectors. Neighbours' inputs lie `step` elements apart; those that lie `ahead` of the
// first tap's are fetched: the next row's, a stream per row that the processor does not see by itself.
template <int K, int P>
static __attribute__((noinline)) void sum_narrow(const float* x, int64_t step, const NarrowTaps& taps, int64_t ahead,
                                                 const float* weights, float* to) {
  Vec sum[P][K];
  SBNET_UNROLL for (int i = 0; i < P; ++i) SBNET_UNROLL for (int k = 0; k < K; ++k) sum[i][k] = Vec{};
  for (int64_t i = 0; i < P; ++i)
    for (int64_t c = 0; c < taps.channels; c += kLineFloats) __builtin_prefetch(x + ahead + i * step + c);
  for (int64_t t = 0; t < taps.count; ++t) {
    const float *from = x + taps.input[t], *w = weights + taps.weight[t];
    int64_t c = taps.channels;
    for (; c >= kLanes; c -= kLanes, from += kLanes, w += K * kLanes) {
      Vec weight[K];
      SBNET_UNROLL for (int k = 0; k < K; ++k) weight[k] = load(w + k * kLanes);
      SBNET_UNROLL for (int i = 0; i < P; ++i) {
        const Vec input = load(from + i * step);
        SBNET_UNROLL for (int k = 0; k < K; ++k) sum[i][k] += input * weight[k];
      }
    }
    if (c) {
      SBNET_UNROLL for (int i = 0; i < P; ++i) {
        const Vec input = load_first(from + i * step, c);
        SBNET_UNROLL for (int k = 0; k < K; ++k) sum[i][k] += input * load(w + k * kLanes);
      }
    }
  }
  constexpr int kRoom = (P * K + kLanes - 1) / kLanes * kLanes;
  Vec all[kRoom] = {};
  SBNET_UNROLL for (int i = 0; i < P; ++i) SBNET_UNROLL for (int k = 0; k < K; ++k) all[i * K + k] = sum[i][k];
  for (int i = 0; i < kRoom; i += kLanes) store(to + i, sums_of(all + i));
}

using SumNarrow = void (*)(const float*, int64_t, const NarrowTaps&, int64_t, const float*, float*);

struct NarrowKernels {
  int64_t pixels;
  SumNarrow many, one;
};

template <int K>
static NarrowKernels narrow_kernels_of(int64_t outputs) {
  if constexpr (K < kNarrowOutputs)
    if (outputs > K) return narrow_kernels_of<K + 1>(outputs);
  return {narrow_pixels(K), sum_narrow<K, narrow_pixels(K)>, sum_narrow<K, 1>};
}

// The taps inside the plane, for outputs whose first tap reads (top, left).
static void list_inside(const ConvPlan& plan, int64_t top, int64_t left, NarrowTaps* taps) {
  const Conv2dParams& p = plan.p;
  const int64_t S = plan.weight.size[3], tap_weights = plan.group_out * whole_vectors(plan.group_in);
  int64_t row, rows, column, columns;
  inside(top, p.dilation[0], plan.weight.size[2], p.x.size[2], &row, &rows);
  inside(left, p.dilation[1], S, p.x.size[3], &column, &columns);
  taps->count = 0;
  taps->channels = plan.group_in;
  for (int64_t r = row; r < row + rows; ++r)
    for (int64_t s = column; s < column + columns; ++s) {
      taps->input[taps->count] = r * p.dilation[0] * p.x.stride[2] + s * p.dilation[1] * p.x.stride[3];
      taps->weight[taps->count++] = (r * S + s) * tap_weights;
    }
}

// Sums of some neighbours, [pixels][outputs], to y at its first.
static void finish_narrow(const ConvPlan& plan, const PanelEnd& end, int64_t pixels, float* sums, float* y,
                          const float* residual) {
  const Conv2dParams& p = plan.p;
  const int64_t K = plan.group_out;
  const bool after = adds_after(p);
  alignas(64) float added[kNarrowRoom] = {};
  if (residual)
    for (int64_t i = 0; i < pixels; ++i)
      for (int64_t k = 0; k < K; ++k) added[i * K + k] = residual[i * p.residual.stride[3] + k * p.residual.stride[1]];
  for (int64_t v = 0; v < pixels * K; v += kLanes)
    store(sums + v,
          ended(p.activation, after, load(sums + v) + load(end.bias + v), load(end.slope + v), load(added + v)));
  for (int64_t i = 0; i < pixels; ++i)
    for (int64_t k = 0; k < K; ++k) y[i * p.y.stride[3] + k * p.y.stride[1]] = sums[i * K + k];
}

static void run_narrow(const ConvPlan& plan, const ConvJob& job) {
  const Conv2dParams& p = plan.p;
  const NarrowKernels kernels = narrow_kernels_of<1>(plan.group_out);
  const float* weights = static_cast<const float*>(job.weights) + plan.narrow_at;
  static_assert(kNarrowRoom <= kPanelWidth, "an end holds the channels of several pixels");
  PanelEnd end;
  load_end<float>(p, 0, plan.group_out, &end);
  for (int64_t i = plan.group_out; i < kNarrowRoom; ++i)
    end.bias[i] = end.bias[i - plan.group_out], end.slope[i] = end.slope[i - plan.group_out];
  alignas(64) float sums[kNarrowRoom];
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    for (int64_t r = rect.row; r < rect.row + rect.height; ++r) {
      const int64_t top = r * p.stride[0] - p.padding[0], reach = (plan.weight.size[3] - 1) * p.dilation[1];
      const float* x = static_cast<const float*>(p.x.data) + rect.n * p.x.stride[0] + top * p.x.stride[2];
      float* y = static_cast<float*>(p.y.data) + rect.n * p.y.stride[0] + r * p.y.stride[2];
      const float* residual = p.residual.data ? static_cast<const float*>(p.residual.data) +
                                                    rect.n * p.residual.stride[0] + r * p.residual.stride[2]
                                              : nullptr;
      const int64_t ahead = ((plan.weight.size[2] - 1) * p.dilation[0] + p.stride[0]) * p.x.stride[2];
      NarrowTaps whole, part;
      list_inside(plan, top, 0, &whole);  // of a row: where columns lie inside is asked for each run
      int64_t pixels;
      for (int64_t c = rect.column, last = rect.column + rect.width; c < last; c += pixels) {
        const int64_t left = c * p.stride[1] - p.padding[1], step = p.stride[1] * p.x.stride[3];
        const auto fits = [&](int64_t count) {
          return left >= 0 && left + (count - 1) * p.stride[1] + reach < p.x.size[3];
        };
        const bool many = c + kernels.pixels <= last && fits(kernels.pixels);
        pixels = many ? kernels.pixels : 1;
        const bool clipped = !fits(pixels);
        if (clipped) list_inside(plan, top, left, &part);
        (many ? kernels.many : kernels.one)(x + left * p.x.stride[3], step, clipped ? part : whole, ahead, weights,
                                            sums);
        finish_narrow(plan, end, pixels, sums, y + c * p.y.stride[3],
                      residual ? residual + c * p.residual.stride[3] : nullptr);
      }
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
