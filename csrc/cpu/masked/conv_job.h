// One job of the CPU convolution: the pixels of its tile, slice by slice of channels and taps. The instruction set
// declares run_slice before it includes this. Its sums of a panel are rows of kPanelWidth floats.
#pragma once
#include "cpu/masked/conv_pack.h"

namespace sbnet {
namespace SBNET_ISA {

// ---- Epilogue: y = activation(sums + bias + residual), or + residual after it, for some pixels and one panel.

// Can sums go to y as vectors? Other types and layouts go by a row in float32.
template <class T>
SBNET_INLINE bool stores_vectors(const ConvPlan& plan) {
  const Conv2dParams& p = plan.p;
  return sizeof(T) == 4 && p.y.stride[1] == 1 && (!p.residual.data || p.residual.stride[1] == 1);
}

// What a panel's channels have: bias, 0 without one, and the slope below zero.
struct PanelEnd {
  alignas(64) float bias[kPanelWidth], slope[kPanelWidth];
};

// v, bias and all, with what is added to it.
SBNET_INLINE Vec ended(Activation activation, bool after, Vec v, Vec slope, Vec residual) {
  return after ? activate(activation, slope, v) + residual : activate(activation, slope, v + residual);
}

// With one activation, so that no vector asks which.
template <Activation kActivation>
static __attribute__((noinline)) void finish_vectors(const Conv2dParams& p, const ConvPixels& pixels, int64_t begin,
                                                     int64_t end, int64_t k0, int64_t channels, const PanelEnd& panel,
                                                     const float* sums) {
  float* y = static_cast<float*>(p.y.data) + k0;
  const float* residual = p.residual.data ? static_cast<const float*>(p.residual.data) + k0 : nullptr;
  const bool after = adds_after(p);
  for (int64_t i = begin; i < end; ++i, sums += kPanelWidth)
    for (int64_t v = 0; v < channels; v += kLanes) {
      const int64_t count = smaller(kLanes, channels - v);
      Vec sum = load(sums + v) + load(panel.bias + v);
      const Vec slope = load(panel.slope + v);
      sum = residual ? ended(kActivation, after, sum, slope, load_some(residual + pixels.residual[i] + v, count))
                     : activate(kActivation, slope, sum);
      store_some(y + pixels.y[i] + v, sum, count);
    }
}

using FinishVectors = void (*)(const Conv2dParams&, const ConvPixels&, int64_t, int64_t, int64_t, int64_t,
                               const PanelEnd&, const float*);

static FinishVectors finish_vectors_of(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return finish_vectors<Activation::kNone>;
    case Activation::kRelu:
      return finish_vectors<Activation::kRelu>;
    case Activation::kRelu6:
      return finish_vectors<Activation::kRelu6>;
    case Activation::kLeakyRelu:
      return finish_vectors<Activation::kLeakyRelu>;
    case Activation::kSilu:
      return finish_vectors<Activation::kSilu>;
    case Activation::kGelu:
      return finish_vectors<Activation::kGelu>;
    case Activation::kHardswish:
      break;
  }
  return finish_vectors<Activation::kHardswish>;
}

template <class T>
static __attribute__((noinline)) void finish(const ConvPlan& plan, const ConvPixels& pixels, int64_t begin, int64_t end,
                                             int64_t k0, int64_t channels, const PanelEnd& panel, const float* sums) {
  const Conv2dParams& p = plan.p;
  if (stores_vectors<T>(plan)) return finish_vectors_of(p.activation)(p, pixels, begin, end, k0, channels, panel, sums);
  alignas(64) float row[kPanelWidth], residual[kPanelWidth] = {};
  const bool after = adds_after(p);
  for (int64_t i = begin; i < end; ++i, sums += kPanelWidth) {
    if (p.residual.data)
      load_row(residual, static_cast<const T*>(p.residual.data) + pixels.residual[i] + k0 * p.residual.stride[1],
               p.residual.stride[1], channels);
    for (int64_t v = 0; v < channels; v += kLanes)
      store(row + v, ended(p.activation, after, load(sums + v) + load(panel.bias + v), load(panel.slope + v),
                           load(residual + v)));
    store_row(static_cast<T*>(p.y.data) + pixels.y[i] + k0 * p.y.stride[1], p.y.stride[1], row, channels);
  }
}

// Numbers a channel, of float or T, as floats.
template <class T>
static void load_numbers(const void* from, DType dtype, int64_t k0, int64_t channels, float* to) {
  if (dtype == DType::kF32)
    load_row(to, static_cast<const float*>(from) + k0, 1, channels);
  else
    load_row(to, static_cast<const T*>(from) + k0, 1, channels);
}
template <class T>
static void load_end(const Conv2dParams& p, int64_t k0, int64_t channels, PanelEnd* panel) {
  for (int64_t k = 0; k < kPanelWidth; ++k) panel->bias[k] = 0, panel->slope[k] = p.activation_param;
  if (p.bias) load_numbers<T>(p.bias, p.bias_dtype, k0, channels, panel->bias);
  if (p.slope) load_numbers<T>(p.slope, p.slope_dtype, k0, channels, panel->slope);
}

// ---- One job.

// Pixel (r, c) of the job's rect `q`, behind those that are listed.
SBNET_INLINE void list_pixel(const ConvPlan& plan, const ConvJob& job, int64_t q, int32_t r, int32_t c) {
  ConvPixels& px = *job.pixels;
  const TensorView &y = plan.p.y, &residual = plan.p.residual;
  const ConvRect& rect = job.rects[q];
  const int64_t row = rect.row + r, column = rect.column + c;
  px.rect[px.count] = static_cast<int32_t>(q);
  px.row[px.count] = r;
  px.column[px.count] = c;
  px.y[px.count] = rect.n * y.stride[0] + row * y.stride[2] + column * y.stride[3];
  if (residual.data)
    px.residual[px.count] = rect.n * residual.stride[0] + row * residual.stride[2] + column * residual.stride[3];
  ++px.count;
}

static void list_pixels(const ConvPlan& plan, const ConvJob& job) {
  ConvPixels& px = *job.pixels;
  px.count = 0;
  for (int64_t q = 0; q < job.rect_count; ++q)
    for (int32_t r = 0; r < job.rects[q].height; ++r)
      for (int32_t c = 0; c < job.rects[q].width; ++c) list_pixel(plan, job, q, r, c);
  for (int32_t i = px.count; i % kMicroPixels; ++i) {
    px.y[i] = px.y[px.count - 1];
    px.residual[i] = px.residual[px.count - 1];
  }
}

static void locate_pixels(const ConvPlan& plan, ConvPixels& px, const AxisTaps& rows, const AxisTaps& columns) {
  for (int32_t i = 0; i < px.count; ++i)
    px.patch[i] = ((px.rect[i] * int64_t{rows.slots} + px.row[i] * rows.output_step) * columns.slots +
                   px.column[i] * columns.output_step) *
                  plan.patch_channels;
  for (int32_t i = px.count; i % kMicroPixels; ++i) px.patch[i] = px.patch[px.count - 1];
}

// The same without patches: where each pixel's inputs begin in x.
static void locate_inputs(const ConvPlan& plan, const ConvJob& job) {
  ConvPixels& px = *job.pixels;
  const TensorView& x = plan.p.x;
  for (int32_t i = 0; i < px.count; ++i) {
    const ConvRect& rect = job.rects[px.rect[i]];
    px.patch[i] = rect.n * x.stride[0] + (rect.row + px.row[i]) * plan.p.stride[0] * x.stride[2] +
                  (rect.column + px.column[i]) * plan.p.stride[1] * x.stride[3];
  }
  for (int32_t i = px.count; i % kMicroPixels; ++i) px.patch[i] = px.patch[px.count - 1];
}

// What a microkernel walks: `count` runs of `channels` neighbouring elements of a pixel's patch.
struct Taps {
  int64_t count, channels;
  int64_t offset[kMaxAxisTaps * kMaxAxisTaps];  // of each tap from a pixel's first, in elements
};

// A slice: some input channels and taps, for all pixels and output channels of the job.
struct Slice {
  const void* inputs;  // what pixels and taps are counted from: the patch, or x
  Taps taps;
  int64_t c0, channels;
  int64_t tap_count, taps_before;  // taps_before: in earlier slices of these channels
  bool first, last;
};

// Taps of a row whose channels follow each other in the patch make one run: 7x7x3 is 7 runs of 21.
static Taps list_taps(const ConvPlan& plan, const AxisTaps& rows, const AxisTaps& columns, int64_t channels) {
  channels = whole_depths(channels);
  bool joined = !plan.lanewise && channels == plan.patch_channels;
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

// A slice's weights for the j-th panel of the job.
template <class T>
SBNET_INLINE const Stored<T>* weights_of(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t j) {
  const int64_t panel = job.first_panel + j;
  const int64_t before = slice.c0 * plan.taps() + slice.taps_before * whole_depths(slice.channels);
  return static_cast<const Stored<T>*>(job.weights) + plan.panel_offset(job.group, panel) +
         before * plan.width_of_panel(panel);
}

// The weights that a job reads next: those of the next panel, or of the first one in the next slice. Few pixels do
// little work on a slice; fetched from memory only when they are wanted, its weights would take as long as that work.
struct NextWeights {
  const char* at;
  int64_t bytes;
};

template <class T>
SBNET_INLINE NextWeights next_weights(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t j) {
  const int64_t elements = slice.tap_count * whole_depths(slice.channels), step = sizeof(Stored<T>);
  const int64_t next = j + 1 < job.panels ? j + 1 : 0, width = plan.width_of_panel(job.first_panel + next);
  const Stored<T>* from = weights_of<T>(plan, job, slice, next) + (next ? 0 : elements * width);
  return {reinterpret_cast<const char*>(from), elements * width * step};
}

// Fetches the share of pixels [begin, end) of `count` into the second cache: the first one is full of this slice.
SBNET_INLINE void fetch(const NextWeights& next, int64_t begin, int64_t end, int64_t count) {
  const int64_t lines = (next.bytes + 63) / 64;
  for (int64_t line = lines * begin / count; line < lines * end / count; ++line)
    __builtin_prefetch(next.at + line * 64, 0, 2);
}

template <class T>
static void run_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t output_step);

template <class T>
static void run(const ConvPlan& plan, const ConvJob& job) {
  const int64_t R = plan.weight.size[2], S = plan.weight.size[3];
  list_pixels(plan, job);
  if (plan.way == ConvWay::kInPlace) locate_inputs(plan, job);
  AxisTaps rows, columns;
  Slice slice;
  for (slice.c0 = 0; slice.c0 < plan.group_in; slice.c0 += plan.chunk) {
    slice.channels = smaller(plan.chunk, plan.group_in - slice.c0);
    PatchChannels ch{job.group * plan.group_in + slice.c0, slice.channels, 1};
    if (plan.lanewise) {
      ch.first = job.first_panel * kPanelWidth;
      ch.count = smaller(kPanelWidth, plan.group_out - ch.first);
      ch.multiplier = plan.group_out / (plan.p.groups * plan.group_in);
    }
    slice.taps_before = 0;
    for (int32_t r0 = 0; r0 < R; r0 += rows.taps) {
      rows = next_axis_taps(plan, 0, r0);
      for (int32_t s0 = 0; s0 < S; s0 += columns.taps) {
        columns = next_axis_taps(plan, 1, s0);
        slice.taps = list_taps(plan, rows, columns, slice.channels);
        slice.first = slice.c0 == 0 && slice.taps_before == 0;
        slice.tap_count = int64_t{rows.taps} * columns.taps;
        slice.last = slice.c0 + slice.channels == plan.group_in && slice.taps_before + slice.tap_count == plan.taps();
        if (plan.way == ConvWay::kInPlace) {
          slice.inputs = static_cast<const T*>(plan.p.x.data) + ch.first;
        } else {
          slice.inputs = job.patch;
          locate_pixels(plan, *job.pixels, rows, columns);
          for (int64_t q = 0; q < job.rect_count; ++q)
            fill_patch<T>(plan, job.rects[q], rows, columns, ch,
                          static_cast<Stored<T>*>(job.patch) + q * rows.slots * columns.slots * plan.patch_channels);
        }
        run_slice<T>(plan, job, slice, columns.output_step);
        slice.taps_before += slice.tap_count;
      }
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
