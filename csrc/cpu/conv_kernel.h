// The arithmetic of the CPU convolution for one instruction set: weight packing, patches, microkernels, epilogue.
// conv_plan.h describes the loop order. Included once by each conv_<isa>.cpp.
#pragma once
#include "cpu/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

// ---- Packed weights.

// One tap and one chunk of kLanes output channels: a transpose. Whole cache lines are written.
template <class T>
static void pack_tap(const T* from, int64_t k_stride, int64_t c_stride, int64_t used, int64_t channels, float* to,
                     int64_t width) {
  for (int64_t c = 0; c < channels; ++c, to += width, from += c_stride) {
    alignas(64) float lanes[kLanes] = {};
    if (used == kLanes)
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] = widen(from[k * k_stride]);
    else
      for (int64_t k = 0; k < used; ++k) lanes[k] = widen(from[k * k_stride]);
    store(to, load(lanes));
  }
}

// All input channels and taps of kLanes output channels from k0 on.
template <class T>
static void pack_lanes(const ConvPlan& plan, int64_t group, int64_t k0, float* packed) {
  const TensorView& w = plan.p.weight;
  const int64_t R = w.size[2], S = w.size[3], C = plan.group_in, panel = k0 / kPanelWidth;
  const int64_t width = plan.width_of_panel(panel), used = smaller(kLanes, plan.group_out - k0);
  const int64_t chunks = (C + plan.chunk - 1) / plan.chunk;
  const bool by_chunk = w.stride[1] != 1;  // follow the order of the weights in memory
  const T* source = static_cast<const T*>(w.data) + (group * plan.group_out + k0) * w.stride[0];
  float* to = packed + plan.panel_offset(group, panel) + k0 % kPanelWidth;
  int64_t taps_done = 0;
  AxisTaps rows, columns;
  for (int32_t r0 = 0; r0 < R; r0 += rows.taps) {
    rows = next_axis_taps(plan, 0, r0);
    for (int32_t s0 = 0; s0 < S; s0 += columns.taps) {
      columns = next_axis_taps(plan, 1, s0);
      const int64_t taps = int64_t{rows.taps} * columns.taps;
      for (int64_t i = 0; i < taps * chunks; ++i) {
        const int64_t tap = by_chunk ? i % taps : i / chunks, c0 = (by_chunk ? i / taps : i % chunks) * plan.chunk;
        const int64_t r = r0 + tap / columns.taps, s = s0 + tap % columns.taps;
        const int64_t channels = smaller(plan.chunk, C - c0);
        pack_tap(source + c0 * w.stride[1] + r * w.stride[2] + s * w.stride[3], w.stride[0], w.stride[1], used,
                 channels, to + (c0 * R * S + (taps_done + tap) * channels) * width, width);
      }
      taps_done += taps;
    }
  }
}

static void pack_weights(const ConvPlan& plan, float* packed, int64_t begin, int64_t end) {
  const int64_t per_group = (plan.group_out + kLanes - 1) / kLanes;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t group = i / per_group, k0 = i % per_group * kLanes;
    switch (plan.p.weight.dtype) {
      case DType::kF16:
        pack_lanes<Half>(plan, group, k0, packed);
        break;
      case DType::kBF16:
        pack_lanes<BFloat>(plan, group, k0, packed);
        break;
      default:
        pack_lanes<float>(plan, group, k0, packed);
        break;
    }
  }
}

// ---- Patches.

// What a patch slot holds: input channels first, first + 1, ... or, for depthwise, the one input channel of each
// output channel (a channel `multiplier` times in a row).
struct PatchChannels {
  int64_t first, count, multiplier;
};

// `count` slots from input pixels `step` elements apart, all of them in the plane.
template <class T>
static void copy_slots(float* to, int64_t slot, const T* from, int64_t step, int64_t count, int64_t channel_stride,
                       const PatchChannels& ch) {
  if (ch.multiplier > 1) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < ch.count; ++c)
        to[i * slot + c] = widen(from[i * step + (ch.first + c) / ch.multiplier * channel_stride]);
    return;
  }
  from += ch.first * channel_stride;
  if (channel_stride == 1 && step == ch.count && slot == ch.count) return load_row(to, from, 1, count * ch.count);
  if (channel_stride == 1) {
    for (int64_t i = 0; i < count; ++i, to += slot, from += step) {
      __builtin_prefetch(from + ch.count);  // the next chunk of this pixel
      load_row(to, from, 1, ch.count);
    }
    return;
  }
  for (int64_t c = 0; c < ch.count; ++c)  // NCHW memory: neighbours in a row are neighbours in memory
    for (int64_t i = 0; i < count; ++i) to[i * slot + c] = widen(from[c * channel_stride + i * step]);
}

static void zero_slots(float* to, int64_t slots, int64_t slot) {
  if (slots > 0) __builtin_memset(to, 0, slots * slot * 4);
}

// The patch of one rect: slots of rows x slots of columns, zeros where the input plane ends. Slots that only outputs
// beyond a clipped rect would read are left out.
template <class T>
static __attribute__((noinline)) void fill_patch(const ConvPlan& plan, const ConvRect& rect, const AxisTaps& rows,
                                                 const AxisTaps& columns, const PatchChannels& ch, float* patch) {
  const TensorView& x = plan.p.x;
  const int64_t slot = plan.patch_channels, H = x.size[2], W = x.size[3];
  const int64_t row_step = rows.input_step, column_step = columns.input_step;
  const int64_t top = rect.row * plan.p.stride[0] - plan.p.padding[0];
  const int64_t left = rect.column * plan.p.stride[1] - plan.p.padding[1];
  const int64_t unused_rows = (plan.tile[0] - rect.height) * rows.output_step;
  const int64_t unused_columns = (plan.tile[1] - rect.width) * columns.output_step;
  const T* image = static_cast<const T*>(x.data) + rect.n * x.stride[0];
  for (int v = 0; v < rows.segments; ++v)
    for (int64_t i = 0; i < rows.segment[v].count - unused_rows; ++i) {
      float* to_row = patch + (rows.segment[v].slot + i) * columns.slots * slot;
      const int64_t row = top + rows.segment[v].coordinate + i * row_step;
      for (int u = 0; u < columns.segments; ++u) {
        float* to = to_row + columns.segment[u].slot * slot;
        const int64_t count = columns.segment[u].count - unused_columns;
        const int64_t first = left + columns.segment[u].coordinate;
        if (row < 0 || row >= H) {
          zero_slots(to, count, slot);
          continue;
        }
        const int64_t before = first < 0 ? smaller(count, (-first + column_step - 1) / column_step) : 0;
        const int64_t until = first < W ? smaller(count, (W - first + column_step - 1) / column_step) : 0;
        const int64_t inside = larger(until, before);
        zero_slots(to, before, slot);
        if (inside > before)
          copy_slots(to + before * slot, slot, image + row * x.stride[2] + (first + before * column_step) * x.stride[3],
                     column_step * x.stride[3], inside - before, x.stride[1], ch);
        zero_slots(to + inside * slot, count - inside, slot);
      }
    }
}

// ---- Microkernels: kMicroPixels pixels x V vectors of output channels, sums in registers.

// What a microkernel walks: `count` runs of `channels` neighbouring floats of a pixel's patch.
struct Taps {
  int64_t count, channels;
  int64_t offset[kMaxAxisTaps * kMaxAxisTaps];  // of each tap from a pixel's first, in floats
};

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

// Depthwise: every lane has its own input channel.
template <int V>
SBNET_INLINE void add_lanes(Vec (&sum)[kMicroPixels][V], const float* const (&x)[kMicroPixels], int64_t at,
                            const float* w) {
  SBNET_UNROLL for (int v = 0; v < V; ++v) {
    const Vec weight = load(w + v * kLanes);
    SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) sum[i][v] += load(x[i] + at + v * kLanes) * weight;
  }
}

// sums[pixel][V*kLanes], pixels `kPanelWidth` apart: += or, for the first slice, =. A slice is summed from zero and
// then added: two short chains of roundings instead of one long one.
template <int V, bool kDepthwise>
static __attribute__((noinline)) void microkernel(const float* patch, const int64_t* pixels, const Taps& taps,
                                                  const float* w, float* sums, bool first) {
  const float* const x[kMicroPixels] = {patch + pixels[0], patch + pixels[1], patch + pixels[2],
                                        patch + pixels[3], patch + pixels[4], patch + pixels[5]};
  Vec sum[kMicroPixels][V];
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  constexpr int kStep = V * kLanes;
  for (int64_t t = 0; t < taps.count; ++t) {
    int64_t at = taps.offset[t];
    if (kDepthwise) {
      add_lanes<V>(sum, x, at, w);
      w += kStep;
      continue;
    }
    int64_t c = taps.channels;
    for (; c >= 4; c -= 4, at += 4, w += 4 * kStep) {
      add_channel<V>(sum, x, at, w);
      add_channel<V>(sum, x, at + 1, w + kStep);
      add_channel<V>(sum, x, at + 2, w + 2 * kStep);
      add_channel<V>(sum, x, at + 3, w + 3 * kStep);
    }
    for (; c > 0; --c, ++at, w += kStep) add_channel<V>(sum, x, at, w);
  }
  SBNET_UNROLL for (int i = 0; i < kMicroPixels; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) {
    float* to = sums + i * kPanelWidth + v * kLanes;
    store(to, first ? sum[i][v] : load(to) + sum[i][v]);
  }
}

using Microkernel = void (*)(const float*, const int64_t*, const Taps&, const float*, float*, bool);

template <bool kDepthwise>
static Microkernel microkernel_of(int64_t width) {
  static_assert(kVectors == 2 || kVectors == 4, "the switch below");
  constexpr int kThreeVectors = kVectors < 3 ? kVectors : 3;  // never reached with panels of two
  switch (width / kLanes) {
    case 1:
      return microkernel<1, kDepthwise>;
    case 2:
      return microkernel<2, kDepthwise>;
    case 3:
      return microkernel<kThreeVectors, kDepthwise>;
    default:
      return microkernel<kVectors, kDepthwise>;
  }
}

// ---- Epilogue: y = activation(sums + bias + residual) for some pixels and one panel.

template <class T>
static __attribute__((noinline)) void finish(const ConvPlan& plan, const ConvPixels& pixels, int64_t begin, int64_t end,
                                             int64_t k0, int64_t channels, const float* bias, const float* sums) {
  const Conv2dParams& p = plan.p;
  alignas(64) float row[kPanelWidth], residual[kPanelWidth] = {};
  for (int64_t i = begin; i < end; ++i, sums += kPanelWidth) {
    if (p.residual.data)
      load_row(residual, static_cast<const T*>(p.residual.data) + pixels.residual[i] + k0 * p.residual.stride[1],
               p.residual.stride[1], channels);
    for (int64_t v = 0; v < channels; v += kLanes)
      store(row + v, activate(p.activation, p.activation_param, load(sums + v) + load(bias + v) + load(residual + v)));
    store_row(static_cast<T*>(p.y.data) + pixels.y[i] + k0 * p.y.stride[1], p.y.stride[1], row, channels);
  }
}

template <class T>
static void load_bias(const Conv2dParams& p, int64_t k0, int64_t channels, float* bias) {
  __builtin_memset(bias, 0, kPanelWidth * 4);
  if (!p.bias) return;
  if (p.bias_dtype == DType::kF32)
    load_row(bias, static_cast<const float*>(p.bias) + k0, 1, channels);
  else
    load_row(bias, static_cast<const T*>(p.bias) + k0, 1, channels);
}

// ---- One job.

static void list_pixels(const ConvPlan& plan, const ConvJob& job) {
  ConvPixels& px = *job.pixels;
  const TensorView &y = plan.p.y, &residual = plan.p.residual;
  px.count = 0;
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    for (int32_t r = 0; r < rect.height; ++r)
      for (int32_t c = 0; c < rect.width; ++c, ++px.count) {
        const int64_t row = rect.row + r, column = rect.column + c;
        px.rect[px.count] = static_cast<int32_t>(q);
        px.row[px.count] = r;
        px.column[px.count] = c;
        px.y[px.count] = rect.n * y.stride[0] + row * y.stride[2] + column * y.stride[3];
        if (residual.data)
          px.residual[px.count] = rect.n * residual.stride[0] + row * residual.stride[2] + column * residual.stride[3];
      }
  }
}

static void locate_pixels(const ConvPlan& plan, ConvPixels& px, const AxisTaps& rows, const AxisTaps& columns) {
  for (int32_t i = 0; i < px.count; ++i)
    px.patch[i] = ((px.rect[i] * int64_t{rows.slots} + px.row[i] * rows.output_step) * columns.slots +
                   px.column[i] * columns.output_step) *
                  plan.patch_channels;
  for (int32_t i = px.count; i % kMicroPixels; ++i) px.patch[i] = px.patch[px.count - 1];
}

// A slice: some input channels and taps, for all pixels and output channels of the job.
struct Slice {
  Taps taps;
  int64_t c0, channels;
  int64_t tap_count, taps_before;  // taps_before: in earlier slices of these channels
  bool first, last;
};

template <class T>
static void run_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice) {
  const ConvPixels& px = *job.pixels;
  for (int64_t j = 0; j < job.panels; ++j) {
    const int64_t panel = job.first_panel + j, width = plan.width_of_panel(panel), k = panel * kPanelWidth;
    const int64_t channels = smaller(width, plan.group_out - k), k0 = job.group * plan.group_out + k;
    const int64_t before = slice.c0 * plan.taps() + slice.taps_before * slice.channels;
    const float* w = job.weights + plan.panel_offset(job.group, panel) + before * width;
    float* sums = job.sums + j * kTileCapacity * kPanelWidth;
    const Microkernel micro = plan.depthwise ? microkernel_of<true>(width) : microkernel_of<false>(width);
    alignas(64) float bias[kPanelWidth];
    if (slice.last) load_bias<T>(plan.p, k0, channels, bias);
    for (int64_t i = 0; i < px.count; i += kMicroPixels, sums += kMicroPixels * kPanelWidth) {
      micro(job.patch, px.patch + i, slice.taps, w, sums, slice.first);
      if (slice.last) finish<T>(plan, px, i, smaller(i + kMicroPixels, px.count), k0, channels, bias, sums);
    }
  }
}

// Taps of a row whose channels follow each other in the patch make one run: 7x7x3 is 7 runs of 21.
static Taps list_taps(const ConvPlan& plan, const AxisTaps& rows, const AxisTaps& columns, int64_t channels) {
  bool joined = !plan.depthwise && channels == plan.patch_channels;
  for (int32_t s = 1; s < columns.taps; ++s) joined &= columns.tap_slot[s] == columns.tap_slot[s - 1] + 1;
  Taps taps;
  taps.count = 0;
  taps.channels = joined ? columns.taps * channels : channels;
  for (int32_t r = 0; r < rows.taps; ++r)
    for (int32_t s = 0; s < (joined ? 1 : columns.taps); ++s)
      taps.offset[taps.count++] =
          (int64_t{rows.tap_slot[r]} * columns.slots + columns.tap_slot[s]) * plan.patch_channels;
  return taps;
}

template <class T>
static void run(const ConvPlan& plan, const ConvJob& job) {
  const int64_t R = plan.p.weight.size[2], S = plan.p.weight.size[3];
  list_pixels(plan, job);
  AxisTaps rows, columns;
  Slice slice;
  for (slice.c0 = 0; slice.c0 < plan.group_in; slice.c0 += plan.chunk) {
    slice.channels = smaller(plan.chunk, plan.group_in - slice.c0);
    PatchChannels ch{job.group * plan.group_in + slice.c0, slice.channels, 1};
    if (plan.depthwise) {
      ch.first = job.first_panel * kPanelWidth;
      ch.count = smaller(kPanelWidth, plan.group_out - ch.first);
      ch.multiplier = plan.group_out / plan.p.groups;
    }
    slice.taps_before = 0;
    for (int32_t r0 = 0; r0 < R; r0 += rows.taps) {
      rows = next_axis_taps(plan, 0, r0);
      for (int32_t s0 = 0; s0 < S; s0 += columns.taps) {
        columns = next_axis_taps(plan, 1, s0);
        slice.taps = list_taps(plan, rows, columns, ch.count);
        slice.first = slice.c0 == 0 && slice.taps_before == 0;
        slice.tap_count = int64_t{rows.taps} * columns.taps;
        slice.last = slice.c0 + slice.channels == plan.group_in && slice.taps_before + slice.tap_count == plan.taps();
        locate_pixels(plan, *job.pixels, rows, columns);
        for (int64_t q = 0; q < job.rect_count; ++q)
          fill_patch<T>(plan, job.rects[q], rows, columns, ch,
                        job.patch + q * rows.slots * columns.slots * plan.patch_channels);
        run_slice<T>(plan, job, slice);
        slice.taps_before += slice.tap_count;
      }
    }
  }
}

static void run_job(const ConvPlan& plan, const ConvJob& job) {
  switch (plan.p.x.dtype) {
    case DType::kF16:
      run<Half>(plan, job);
      break;
    case DType::kBF16:
      run<BFloat>(plan, job);
      break;
    default:
      run<float>(plan, job);
      break;
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
