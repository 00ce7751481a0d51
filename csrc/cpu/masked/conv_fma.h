// The convolution with fused multiply-adds of float32 vectors: its order of weights and its microkernels. conv_plan.h
// describes the loop order. Included once by each conv_<isa>.cpp.
#pragma once
#include "cpu/masked/conv_int8_finish.h"

namespace sbnet {
namespace SBNET_ISA {

template <class T>
using Stored = float;
constexpr int64_t kDepth = 1;
constexpr int kZeroByte = 0;

template <class T>
SBNET_INLINE void put(float* to, T from, float) {
  *to = widen(from);
}
template <class T>
SBNET_INLINE void put_row(float* to, const T* from, int64_t count, float) {
  load_row(to, from, 1, count);
}

// Depthwise layers of int8: patches hold its integers as floats. Rounded: float32 that is rounded to them.
struct Rounded {
  float value;
};
SBNET_INLINE void put(float* to, Rounded from, float per_unit) { *to = saturated(splat(from.value * per_unit))[0]; }
SBNET_INLINE void put_row(float* to, const Rounded* from, int64_t count, float per_unit) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const ByteVec rounded = saturated(load(&from[i].value) * per_unit);
    store(to + i, __builtin_convertvector(__builtin_convertvector(rounded, IntVec), Vec));
  }
  for (; i < count; ++i) put(to + i, from[i], per_unit);
}
SBNET_INLINE void put_row(float* to, const int8_t* from, int64_t count, float) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_channels(from + i, 1, kLanes));
  for (; i < count; ++i) to[i] = from[i];
}

// One tap and one chunk of kLanes output channels: a transpose. Whole cache lines are written. Where input channels are
// neighbours, squares of kLanes x kLanes go through a buffer: each line of the weights, whose rows may all fall into
// one set of the cache, is then read at once.
template <class T>
static void pack_tap(const T* from, int64_t k_stride, int64_t c_stride, int64_t used, int64_t channels, float* to,
                     int64_t width, int64_t lane) {
  to += lane;
  if (k_stride == 1 && used == kLanes) {  // turned weights: nothing to transpose
    for (int64_t c = 0; c < channels; ++c, to += width) load_row(to, from + c * c_stride, 1, kLanes);
    return;
  }
  for (int64_t c0 = 0; c0 < channels; c0 += kLanes) {
    const int64_t count = smaller(kLanes, channels - c0);
    alignas(64) float square[kLanes][kLanes + 1] = {};
    for (int64_t k = 0; k < used; ++k) load_row(square[k], from + k * k_stride + c0 * c_stride, c_stride, count);
    for (int64_t c = 0; c < count; ++c, to += width) {
      alignas(64) float lanes[kLanes];
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] = square[k][c];
      store(to, load(lanes));
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

// ---- Microkernels: kMicroPixels pixels x V vectors of output channels, sums in registers.

#define SBNET_UNROLL _Pragma("GCC unroll 8")

// One input channel: a broadcast input times a row of weights.
template <int V>
SBNET_INLINE void add_channel(Vec (&sum)[kMicroPixels][V], const float* const (&x)[kMicroPixels], int64_t at,
                              const float* w) {
  Vec weight[V];
  SBNET_UNROLL for (int v = 0; v < V; ++v) weight[v] = load(w + v * kLanes);
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) {
    const Vec input = splat(x[i][at]);
    SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] += input * weight[v];
  }
}

// The first lane of each lane's group, of groups of `width` neighbours; a power of two.
SBNET_INLINE IntVec first_lanes(int64_t width) {
  IntVec lanes;
  SBNET_UNROLL for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes & static_cast<int32_t>(-width);
}

// Lanewise: every lane has its own input channel (depthwise), or the channel `order` of its vector.
template <int V, bool kPermuted>
SBNET_INLINE void add_lanes(Vec (&sum)[kMicroPixels][V], const float* const (&x)[kMicroPixels], int64_t at,
                            IntVec order, const float* w) {
  SBNET_UNROLL for (int v = 0; v < V; ++v) {
    const Vec weight = load(w + v * kLanes);
    SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) {
      const Vec input = load(x[i] + at + v * kLanes);
      sum[i][v] += (kPermuted ? permute(input, order) : input) * weight;
    }
  }
}

// Lines of memory that the next microtile needs. They are fetched a few at a time between products: few channels of
// each of many pixels are no stream that the processor would see by itself, and all at once would wait for each other.
constexpr int64_t kLineFloats = 16;
constexpr int64_t kMostLines =
    kMicroPixels * (kMaxSliceChannels / kLineFloats + 2 * ((kPanelWidth + kLineFloats - 1) / kLineFloats));
struct Ahead {
  int64_t count;
  const float* line[kMostLines];
};

// The products of a slice, summed from zero.
template <int V, bool kLanewise>
SBNET_INLINE void sum_slice(Vec (&sum)[kMicroPixels][V], const float* patch, const int64_t* pixels, const Taps& taps,
                            const float* w, const Ahead& ahead) {
  const float* const x[kMicroPixels] = {patch + pixels[0], patch + pixels[1], patch + pixels[2],
                                        patch + pixels[3], patch + pixels[4], patch + pixels[5]};
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  constexpr int kStep = V * kLanes;
  const int64_t steps = taps.count * (taps.channels / 4), per_step = steps ? (ahead.count + steps - 1) / steps : 0;
  int64_t fetched = 0;
  for (int64_t t = 0; t < taps.count; ++t) {
    int64_t at = taps.offset[t];
    if (kLanewise && taps.channels == 1) {
      add_lanes<V, false>(sum, x, at, IntVec{}, w);
      w += kStep;
      continue;
    }
    if (kLanewise) {
      const IntVec first = first_lanes(taps.channels);
      for (int32_t c = 0; c < taps.channels; ++c, w += kStep) add_lanes<V, true>(sum, x, at, first + c, w);
      continue;
    }
    int64_t c = taps.channels;
    for (; c >= 4; c -= 4, at += 4, w += 4 * kStep) {
      for (int64_t until = smaller(fetched + per_step, ahead.count); fetched < until; ++fetched)
        __builtin_prefetch(ahead.line[fetched]);
      add_channel<V>(sum, x, at, w);
      add_channel<V>(sum, x, at + 1, w + kStep);
      add_channel<V>(sum, x, at + 2, w + 2 * kStep);
      add_channel<V>(sum, x, at + 3, w + 3 * kStep);
    }
    for (; c > 0; --c, ++at, w += kStep) add_channel<V>(sum, x, at, w);
  }
}

// sums[pixel][V*kLanes], pixels `kPanelWidth` apart: += or, for the first slice, =. A slice is summed from zero and
// then added: two short chains of roundings instead of one long one.
template <int V, bool kLanewise>
static __attribute__((noinline)) void microkernel(const float* patch, const int64_t* pixels, const Taps& taps,
                                                  const float* w, float* sums, bool first, const Ahead& ahead) {
  Vec sum[kMicroPixels][V];
  sum_slice<V, kLanewise>(sum, patch, pixels, taps, w, ahead);
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + i * kPanelWidth + v * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

using Microkernel = void (*)(const float*, const int64_t*, const Taps&, const float*, float*, bool, const Ahead&);

template <bool kLanewise>
static Microkernel microkernel_of(int64_t width) {
  static_assert(kVectors == 2 || kVectors == 4, "the switch below");
  constexpr int kThreeVectors = kVectors < 3 ? kVectors : 3;  // never reached with panels of two
  switch (width / kLanes) {
    case 1:
      return microkernel<1, kLanewise>;
    case 2:
      return microkernel<2, kLanewise>;
    case 3:
      return microkernel<kThreeVectors, kLanewise>;
    default:
      return microkernel<kVectors, kLanewise>;
  }
}

// What becomes of sums that never leave the registers: y = sums + bias + residual, within bounds.
struct Ending {
  const float *bias, *residual;  // residual: or null
  float* y;
  float low, high;
  int64_t last;  // channels of the last vector: of fewer than its lanes no more are read or written
};

// A slice that is the only one. The last microtile has copies of its last pixel, which y may share with the residual:
// all is read before anything is written.
template <int V, bool kWhole>
static __attribute__((noinline)) void microkernel_to_y(const float* patch, const int64_t* pixels, const Taps& taps,
                                                       const float* w, const Ending& end, const int64_t* y,
                                                       const int64_t* residual, const Ahead& ahead) {
  Vec sum[kMicroPixels][V];
  sum_slice<V, false>(sum, patch, pixels, taps, w, ahead);
  Vec bias[V];
  SBNET_UNROLL for (int v = 0; v < V; ++v) bias[v] = load(end.bias + v * kLanes);
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] += bias[v];
  if (end.residual) {
    SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
      const float* from = end.residual + residual[i] + v * kLanes;
      sum[i][v] += kWhole || v + 1 < V ? load(from) : load_part(from, end.last);
    }
  }
  const Vec low = splat(end.low), high = splat(end.high);
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    const Vec bounded = at_most(high, at_least(low, sum[i][v]));
    float* to = end.y + y[i] + v * kLanes;
    if (kWhole || v + 1 < V)
      store(to, bounded);
    else
      store_part(to, bounded, end.last);
  }
}

using MicrokernelToY = void (*)(const float*, const int64_t*, const Taps&, const float*, const Ending&, const int64_t*,
                                const int64_t*, const Ahead&);

template <bool kWhole>
static MicrokernelToY microkernel_to_y_of(int64_t vectors) {
  constexpr int kThree = kVectors < 3 ? kVectors : 3;
  return vectors == 1   ? microkernel_to_y<1, kWhole>
         : vectors == 2 ? microkernel_to_y<2, kWhole>
         : vectors == 3 ? microkernel_to_y<kThree, kWhole>
                        : microkernel_to_y<kVectors, kWhole>;
}

// What the next microtile, pixels i to i + kMicroPixels, reads and writes in memory: its inputs in place (slice: or
// null), and channels k0 on of y and residual (k0: or -1).
SBNET_INLINE void list_lines(const ConvPlan& plan, const ConvPixels& px, int64_t i, const Slice* slice, int64_t k0,
                             int64_t channels, Ahead* ahead) {
  const Conv2dParams& p = plan.p;
  ahead->count = 0;
  const auto add = [&](const void* base, int64_t first, int64_t count) {
    for (int64_t k = 0; k < count; k += kLineFloats)
      ahead->line[ahead->count++] = static_cast<const float*>(base) + first + k;
  };
  for (const int64_t end = smaller(i + kMicroPixels, px.count); i < end; ++i) {
    if (slice) add(slice->inputs, px.patch[i], slice->channels);
    if (k0 >= 0) add(p.y.data, px.y[i] + k0, channels);
    if (k0 >= 0 && p.residual.data) add(p.residual.data, px.residual[i] + k0, channels);
  }
}

template <class T>
static void run_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t) {
  const ConvPixels& px = *job.pixels;
  Ahead ahead;
  ahead.count = 0;
  for (int64_t j = 0; j < job.panels; ++j) {
    const int64_t panel = job.first_panel + j, width = plan.width_of_panel(panel), k = panel * kPanelWidth;
    const int64_t channels = smaller(width, plan.group_out - k), k0 = job.group * plan.group_out + k;
    const float* w = weights_of<T>(plan, job, slice, j);
    const NextWeights next = next_weights<T>(plan, job, slice, j);
    float* sums = job.sums + j * plan.sum_rows * kPanelWidth;
    const Microkernel micro = plan.lanewise ? microkernel_of<true>(width) : microkernel_of<false>(width);
    PanelEnd numbers;
    if (slice.last) load_end<T>(plan.p, k0, channels, &numbers);
    const bool vectors = stores_vectors<T>(plan);
    const Slice* inputs =
        plan.way == ConvWay::kInPlace && j == 0 ? &slice : nullptr;  // the next panels find them in the cache
    const Conv2dParams& p = plan.p;
    const float* added = static_cast<const float*>(p.residual.data);
    Ending end = {numbers.bias,
                  added ? added + k0 : nullptr,
                  static_cast<float*>(p.y.data) + k0,
                  0,
                  0,
                  channels - (width - kLanes)};
    const bool to_y = slice.first && slice.last && vectors && !plan.lanewise && !adds_after(p) &&
                      bounds_of(p.activation, &end.low, &end.high);
    const MicrokernelToY micro_to_y =
        end.last == kLanes ? microkernel_to_y_of<true>(width / kLanes) : microkernel_to_y_of<false>(width / kLanes);
    for (int64_t i = 0; i < px.count; i += kMicroPixels, sums += kMicroPixels * kPanelWidth) {
      fetch(next, i, smaller(i + kMicroPixels, px.count), px.count);
      if (vectors) list_lines(plan, px, i + kMicroPixels, inputs, slice.last ? k0 : -1, channels, &ahead);
      const float* from = static_cast<const float*>(slice.inputs);
      if (to_y) {
        micro_to_y(from, px.patch + i, slice.taps, w, end, px.y + i, px.residual + i, ahead);
        continue;
      }
      micro(from, px.patch + i, slice.taps, w, sums, slice.first, ahead);
      if (slice.last) finish<T>(plan, px, i, smaller(i + kMicroPixels, px.count), k0, channels, numbers, sums);
    }
  }
}

// Depthwise layers of int8: one panel a job.
static void run_quantized_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice) {
  const ConvPixels& px = *job.pixels;
  const int64_t k0 = job.first_panel * kPanelWidth, width = plan.width_of_panel(job.first_panel);
  const int64_t channels = smaller(width, plan.group_out - k0);
  const float* w = weights_of<float>(plan, job, slice, 0);
  const auto finish = plan.p.y.dtype == DType::kI8 ? finish_quantized<int8_t, float> : finish_quantized<float, float>;
  const Microkernel micro = microkernel_of<true>(width);
  Ahead none;
  none.count = 0;
  Scales scales;
  if (slice.last) load_scales(plan, nullptr, k0, channels, &scales);
  float* sums = job.sums;
  const int64_t step = slice.first && slice.last ? 0 : kMicroPixels * kPanelWidth;  // sums that are not read again
  for (int64_t i = 0; i < px.count; i += kMicroPixels, sums += step) {
    micro(static_cast<const float*>(slice.inputs), px.patch + i, slice.taps, w, sums, slice.first, none);
    if (slice.last) finish(plan, scales, px, i, smaller(i + kMicroPixels, px.count), k0, channels, sums);
  }
}

template <>
void run_slice<int8_t>(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t) {
  run_quantized_slice(plan, job, slice);
}
template <>
void run_slice<Rounded>(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t) {
  run_quantized_slice(plan, job, slice);
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_lanewise.h"
#include "cpu/masked/conv_narrow.h"
#include "cpu/masked/conv_winograd.h"

namespace sbnet {
namespace SBNET_ISA {

template <class T>
static void run_either(const ConvPlan& plan, const ConvJob& job) {
  if (plan.way == ConvWay::kWinograd)
    run_winograd<T>(plan, job);
  else if (plan.way == ConvWay::kLanewiseInPlace && runs_straight(plan, job.first_panel))  // the last panel may not
    run_straight<float>(plan, job);
  else if (plan.way == ConvWay::kNarrow)
    run_narrow(plan, job);
  else
    run<T>(plan, job);
}

static void run_job(const ConvPlan& plan, const ConvJob& job) {
  if (plan.quantized) {
    if (plan.p.x.dtype == DType::kF32) return run<Rounded>(plan, job);
    if (plan.way == ConvWay::kLanewiseInPlace && runs_straight(plan, job.first_panel))
      return run_straight<int8_t>(plan, job);
    return run<int8_t>(plan, job);
  }
  by_dtype<Half, BFloat>(plan.p.x.dtype, [&](auto t) { run_either<decltype(t)>(plan, job); });
}

static void pack_all(const ConvLayout& layout, void* packed, int64_t begin, int64_t end) {
  if (layout.weight.dtype == DType::kI8) return pack_weights<int8_t>(layout, packed, begin, end);
  if (layout.direct)
    by_dtype<Half, BFloat>(layout.weight.dtype, [&](auto t) { pack_weights<decltype(t)>(layout, packed, begin, end); });
  if (layout.winograd) pack_winograd(layout, static_cast<float*>(packed), begin, end);
  if (layout.narrow && begin == 0) pack_narrow(layout, static_cast<float*>(packed));
}

}  // namespace SBNET_ISA
}  // namespace sbnet
