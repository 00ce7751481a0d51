// The convolution of int8: products of a few neighbouring channels at a time, exact sums in 32 bits, scales in the
// epilogue. Included once by each conv_int8_<isa>.cpp of vectors; matrix registers have conv_int8_amx.cpp.
#pragma once
#include "cpu/masked/conv_int8_elements.h"

namespace sbnet {
namespace SBNET_ISA {

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
  const int64_t step = slice.first && slice.last ? 0 : kMicroPixels * kPanelWidth;  // sums that are not read again
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

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_int8_table.h"

namespace sbnet {
namespace SBNET_ISA {
constexpr ConvKernels kTable = {{SBNET_LANES, SBNET_VECTORS, kDepth, sizeof(Element), 0}, pack_all, run_job, nullptr};
}
}  // namespace sbnet
