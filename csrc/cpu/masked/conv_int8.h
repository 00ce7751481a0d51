// The convolution of int8: products of a few neighbouring channels at a time, exact sums in 32 bits, scales in the
// epilogue. Included once by each conv_int8_<isa>.cpp. SBNET_VNNI: patches hold bytes of an offset of 128, which
// unsigned-by-signed dot products want; the weights' sums take the offset back. Else both are widened to 16 bits, of
// whose pairs the sums are exact too.
#pragma once
#include "cpu/masked/conv_int8_finish.h"

namespace sbnet {
namespace SBNET_ISA {

#if defined(SBNET_VNNI)
using Element = uint8_t;
constexpr int64_t kDepth = 4;
constexpr int kZeroByte = 0x80;
#else
using Element = int16_t;
constexpr int64_t kDepth = 2;
constexpr int kZeroByte = 0;
#endif
constexpr int32_t kOffset = kZeroByte;  // what patches hold of a zero

template <class T>
using Stored = Element;

SBNET_INLINE void put(Element* to, int8_t from, float) { *to = static_cast<Element>(from + kOffset); }
SBNET_INLINE void put_row(Element* to, const int8_t* from, int64_t count, float) {
#if defined(SBNET_VNNI)
  const __m512i offset = _mm512_set1_epi8(static_cast<int8_t>(kOffset));  // adding it is xor, as it is the highest bit
  for (; count >= 64; count -= 64, from += 64, to += 64)
    _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_loadu_si512(from), offset));
  if (!count) return;
  const __mmask64 rest = (uint64_t{1} << count) - 1;
  _mm512_mask_storeu_epi8(to, rest, _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, from), offset));
#else
  for (int64_t i = 0; i < count; ++i) put(to + i, from[i], 1);
#endif
}

typedef Element Elements __attribute__((vector_size(kLanes * sizeof(Element))));

SBNET_INLINE void put(Element* to, float from, float per_unit) {
  *to = static_cast<Element>(saturated(splat(from * per_unit))[0] + kOffset);
}
SBNET_INLINE void put_row(Element* to, const float* from, int64_t count, float per_unit) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Elements rounded =
        __builtin_convertvector(saturated(load(from + i) * per_unit), Elements) + static_cast<Element>(kOffset);
    __builtin_memcpy(to + i, &rounded, sizeof(rounded));
  }
  for (; i < count; ++i) put(to + i, from[i], per_unit);
}

// One tap of kLanes output channels: for each kDepth input channels, those of each output channel in a row.
template <class T>
static void pack_tap(const T* from, int64_t k_stride, int64_t c_stride, int64_t used, int64_t channels, Element* to,
                     int64_t width, int64_t lane) {
  to += lane * kDepth;
  for (int64_t c0 = 0; c0 < channels; c0 += kDepth, to += width * kDepth) {
    __builtin_memset(to, 0, kLanes * kDepth * sizeof(Element));
    for (int64_t k = 0; k < used; ++k)
      for (int64_t c = c0; c < smaller(c0 + kDepth, channels); ++c)
        to[k * kDepth + c - c0] = static_cast<Element>(from[k * k_stride + c * c_stride]);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

#define SBNET_UNROLL _Pragma("GCC unroll 8")

// sum + the products of kDepth inputs, the same for all lanes, and each lane's own weights.
SBNET_INLINE IntVec add_products(IntVec sum, const Element* x, const Element* w) {
#if defined(SBNET_VNNI)
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return reinterpret_cast<IntVec>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_set1_epi32(four), _mm512_loadu_si512(w)));
#elif defined(__AVX2__)
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  const __m256i products =
      _mm256_madd_epi16(_mm256_set1_epi32(two), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  return sum + reinterpret_cast<IntVec>(products);
#else
  IntVec products;
  for (int k = 0; k < kLanes; ++k) products[k] = x[0] * w[2 * k] + x[1] * w[2 * k + 1];
  return sum + products;
#endif
}

// kMicroPixels pixels x V vectors of output channels, all of a slice: sums[pixel][V*kLanes], pixels kPanelWidth apart.
template <int V>
static __attribute__((noinline)) void microkernel(const Element* patch, const int64_t* pixels, const Taps& taps,
                                                  const Element* w, int32_t* sums, bool first) {
  const Element* const x[kMicroPixels] = {patch + pixels[0], patch + pixels[1], patch + pixels[2],
                                          patch + pixels[3], patch + pixels[4], patch + pixels[5]};
  IntVec sum[kMicroPixels][V];
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    if (first)
      sum[i][v] = IntVec{};
    else
      __builtin_memcpy(&sum[i][v], sums + i * kPanelWidth + v * kLanes, sizeof(IntVec));
  }
  for (int64_t t = 0; t < taps.count; ++t)
    for (int64_t c = 0; c < taps.channels; c += kDepth, w += V * kLanes * kDepth) {
      const int64_t at = taps.offset[t] + c;
      SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] =
          add_products(sum[i][v], x[i] + at, w + v * kLanes * kDepth);
    }
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v)
      __builtin_memcpy(sums + i * kPanelWidth + v * kLanes, &sum[i][v], sizeof(IntVec));
}

using Microkernel = void (*)(const Element*, const int64_t*, const Taps&, const Element*, int32_t*, bool);

static Microkernel microkernel_of(int64_t width) {
  static_assert(kVectors == 2 || kVectors == 4, "the switch below");
  constexpr int kThreeVectors = kVectors < 3 ? kVectors : 3;  // never reached with panels of two
  switch (width / kLanes) {
    case 1:
      return microkernel<1>;
    case 2:
      return microkernel<2>;
    case 3:
      return microkernel<kThreeVectors>;
    default:
      return microkernel<kVectors>;
  }
}

template <class T>
static void run_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t) {
  const ConvPixels& px = *job.pixels;
  const int64_t step = slice.first && slice.last ? 0 : kMicroPixels * kPanelWidth;  // sums that nobody reads again
  const int32_t* offsets = reinterpret_cast<const int32_t*>(static_cast<const char*>(job.weights) + plan.offsets_at);
  for (int64_t j = 0; j < job.panels; ++j) {
    const int64_t panel = job.first_panel + j, width = plan.width_of_panel(panel), k = panel * kPanelWidth;
    const int64_t channels = smaller(width, plan.group_out - k), k0 = job.group * plan.group_out + k;
    const Element* w = weights_of<T>(plan, job, slice, j);
    const NextWeights next = next_weights<T>(plan, job, slice, j);
    int32_t* sums = reinterpret_cast<int32_t*>(job.sums) + j * plan.sum_rows * kPanelWidth;
    const Microkernel micro = microkernel_of(width);
    const auto finish_pixels =
        plan.p.y.dtype == DType::kI8 ? finish_quantized<int8_t, int32_t> : finish_quantized<float, int32_t>;
    Scales scales;
    if (slice.last) load_scales(plan, offsets, k0, channels, &scales);
    for (int64_t i = 0; i < px.count; i += kMicroPixels, sums += step) {
      const int64_t end = smaller(i + kMicroPixels, px.count);
      fetch(next, i, end, px.count);
      micro(static_cast<const Element*>(job.patch), px.patch + i, slice.taps, w, sums, slice.first);
      if (slice.last) finish_pixels(plan, scales, px, i, end, k0, channels, sums);
    }
  }
}

static void run_job(const ConvPlan& plan, const ConvJob& job) {
  plan.p.x.dtype == DType::kF32 ? run<float>(plan, job) : run<int8_t>(plan, job);
}

static void pack_all(const ConvLayout& layout, void* packed, int64_t begin, int64_t end) {
  pack_weights<int8_t>(layout, packed, begin, end);
  const TensorView& w = layout.weight;
  int32_t* offsets = reinterpret_cast<int32_t*>(static_cast<char*>(packed) + layout.offsets_at);
  const int64_t per_group = (layout.group_out + kLanes - 1) / kLanes;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i / per_group * layout.group_out, k0 = i % per_group * kLanes;
    for (int64_t k = first + k0; k < first + smaller(k0 + kLanes, layout.group_out); ++k) {
      int32_t sum = 0;
      for (int64_t c = 0; c < w.size[1]; ++c)
        for (int64_t r = 0; r < w.size[2]; ++r)
          for (int64_t s = 0; s < w.size[3]; ++s)
            sum += static_cast<const int8_t*>(
                w.data)[k * w.stride[0] + c * w.stride[1] + r * w.stride[2] + s * w.stride[3]];
      offsets[k] = -kOffset * sum;
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
