// Depthwise convolutions, and those of narrow groups, of packed float32 feature maps, and depthwise ones of packed int8
// feature maps, whose sums are exact in float32, straight from x: a patch would be read but once. Some neighbours of a
// row at a time, sums in registers; where padding is read, pixel by pixel over the taps that lie inside. The order of a
// pixel's sums does not depend on the tile; depthwise it is that of the way through patches, of groups it is by input
// channel within a row of taps. Included once by conv_fma.h.
#pragma once

namespace sbnet {
namespace SBNET_ISA {

// Some channels of the taps [first, first + count) that outputs of a row read.
struct Straight {
  int64_t first, count;
  int64_t row_taps;  // of them, in a row
  int64_t inputs;    // of each output channel: neighbours, among them its own
  bool threes;       // rows are of three taps, which lie as far apart as outputs do
  int64_t step;      // elements between neighbouring outputs' inputs
  const int64_t* offset;
  const float* weights;
  int64_t weight_step;  // from input to input of a tap
};

// Where results of neighbours go, `y` and `residual` apart, in elements.
struct Row {
  int64_t y, residual;
};

SBNET_INLINE Vec load_input(const float* x) { return load(x); }
SBNET_INLINE Vec load_input(const int8_t* x) { return load_channels(x, 1, kLanes); }

// One row of three taps, in the order of the taps: an input that up to three outputs read is prepared once.
template <int V, int P, class X, class Prepare>
SBNET_INLINE void add_threes(Vec (&sum)[P][V], const X* x, int64_t step, const Prepare& prepare, const float* w,
                             int64_t tap_step) {
  SBNET_UNROLL for (int v = 0; v < V; ++v) {
    const Vec weight[3] = {load(w + v * kLanes), load(w + tap_step + v * kLanes), load(w + 2 * tap_step + v * kLanes)};
    SBNET_UNROLL for (int j = 0; j < P + 2; ++j) {
      const Vec input = prepare(load_input(x + j * step + v * kLanes));
      SBNET_UNROLL for (int k = 0; k < 3; ++k) if (j >= k && j - k < P) sum[j - k][v] += input * weight[k];
    }
  }
}

// Sums of P neighbours and V vectors: [P][V * kLanes], or, where there is an end to it, y.
template <int V, int P, class X>
static __attribute__((noinline)) void sum_straight(const X* x, const Straight& s, float* sums, const Ending* end,
                                                   const Row& row) {
  Vec sum[P][V];
  SBNET_UNROLL for (int i = 0; i < P; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  const float* w = s.weights + s.first * s.inputs * s.weight_step;
  if (sizeof(X) == 1 && P > 1 && s.threes) {  // to widen an input costs as much as a product
    for (int64_t t = s.first; t < s.first + s.count; t += 3, w += 3 * s.weight_step)
      add_threes<V, P>(sum, x + s.offset[t], s.step, [](Vec v) { return v; }, w, s.weight_step);
  } else if (s.inputs == 1) {
    for (int64_t t = s.first; t < s.first + s.count; ++t, w += s.weight_step) {
      const X* from = x + s.offset[t];
      SBNET_UNROLL for (int v = 0; v < V; ++v) {
        const Vec weight = load(w + v * kLanes);
        SBNET_UNROLL for (int i = 0; i < P; ++i) sum[i][v] += load_input(from + i * s.step + v * kLanes) * weight;
      }
    }
  } else {
    const IntVec first = first_lanes(s.inputs);
    const int64_t tap_step = s.inputs * s.weight_step;
    for (int64_t t = s.first; t < s.first + s.count; t += s.row_taps, w += s.row_taps * tap_step)
      for (int32_t c = 0; c < s.inputs; ++c) {
        if (P > 1 && s.threes) {
          const IntVec order = first + c;
          const auto own = [=](Vec v) { return permute(v, order); };
          add_threes<V, P>(sum, x + s.offset[t], s.step, own, w + c * s.weight_step, tap_step);
          continue;
        }
        for (int64_t k = 0; k < s.row_taps; ++k) SBNET_UNROLL for (int v = 0; v < V; ++v) {
            const Vec weight = load(w + k * tap_step + c * s.weight_step + v * kLanes);
            SBNET_UNROLL for (int i = 0; i < P; ++i) sum[i][v] +=
                permute(load_input(x + s.offset[t + k] + i * s.step + v * kLanes), first + c) * weight;
          }
      }
  }
  if (!end) {
    SBNET_UNROLL for (int i = 0; i < P; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v)
        store(sums + i * kPanelWidth + v * kLanes, sum[i][v]);
    return;
  }
  const Vec low = splat(end->low), high = splat(end->high);
  SBNET_UNROLL for (int v = 0; v < V; ++v) {
    const Vec bias = load(end->bias + v * kLanes);
    SBNET_UNROLL for (int i = 0; i < P; ++i) {
      sum[i][v] += bias;
      if (end->residual) sum[i][v] += load(end->residual + i * row.residual + v * kLanes);
      store(end->y + i * row.y + v * kLanes, at_most(high, at_least(low, sum[i][v])));
    }
  }
}

template <class X>
using SumStraight = void (*)(const X*, const Straight&, float*, const Ending*, const Row&);

template <int P, class X>
static SumStraight<X> sum_straight_of(int64_t vectors) {
  constexpr int kThree = kVectors < 3 ? kVectors : 3;
  return vectors == 1   ? sum_straight<1, P, X>
         : vectors == 2 ? sum_straight<2, P, X>
         : vectors == 3 ? sum_straight<kThree, P, X>
                        : sum_straight<kVectors, P, X>;
}

constexpr int kNeighbours = 4;

// The taps s that lie inside for an output whose first tap reads `at`: [first, first + count).
SBNET_INLINE void inside(int64_t at, int64_t dilation, int64_t taps, int64_t side, int64_t* first, int64_t* count) {
  int64_t begin = 0, end = taps;
  while (begin < end && at + begin * dilation < 0) ++begin;
  while (end > begin && at + (end - 1) * dilation >= side) --end;
  *first = begin;
  *count = end - begin;
}

// `width` channels from `k0` on, in whole vectors, of all pixels of a rect. scales: of int8, whose pixels the job lists
// from `listed` on.
template <class X>
static void run_rect_straight(const ConvPlan& plan, const ConvJob& job, const ConvRect& rect, int64_t k0, int64_t width,
                              Straight s, const PanelEnd& panel, const Scales* scales, int64_t listed) {
  const Conv2dParams& p = plan.p;
  const int64_t R = plan.weight.size[2], S = plan.weight.size[3], vectors = width / kLanes;
  const SumStraight<X> many = sum_straight_of<kNeighbours, X>(vectors), one = sum_straight_of<1, X>(vectors);
  const auto finish = p.y.dtype == DType::kI8 ? finish_quantized<int8_t, float> : finish_quantized<float, float>;
  s.step = p.stride[1] * p.x.stride[3];
  const Row apart = {p.y.stride[3], p.residual.stride[3]};
  Ending bounded = {panel.bias, nullptr, nullptr, 0, 0, kLanes};
  const bool after = adds_after(p), bounds = !after && bounds_of(p.activation, &bounded.low, &bounded.high);
  const Ending* end_of = !scales && bounds ? &bounded : nullptr;
  alignas(64) float sums[kNeighbours * kPanelWidth];
  for (int64_t r = rect.row; r < rect.row + rect.height; ++r) {
    const int64_t top = r * p.stride[0] - p.padding[0];
    int64_t row_first, rows;
    inside(top, p.dilation[0], R, p.x.size[2], &row_first, &rows);
    const X* from = static_cast<const X*>(p.x.data) + rect.n * p.x.stride[0] + top * p.x.stride[2] + k0;
    float* to = static_cast<float*>(p.y.data) + rect.n * p.y.stride[0] + r * p.y.stride[2] + k0;
    const float* add = p.residual.data ? static_cast<const float*>(p.residual.data) + rect.n * p.residual.stride[0] +
                                             r * p.residual.stride[2] + k0
                                       : nullptr;
    for (int64_t c = rect.column, end = rect.column + rect.width; c < end;) {
      const int64_t left = c * p.stride[1] - p.padding[1];
      const int64_t last = left + (kNeighbours - 1) * p.stride[1] + (S - 1) * p.dilation[1];
      int64_t pixels = kNeighbours;
      bounded.y = to + c * p.y.stride[3];
      bounded.residual = add ? add + c * p.residual.stride[3] : nullptr;
      s.first = row_first * S;
      s.count = rows * S;
      s.row_taps = S;
      if (c + kNeighbours <= end && left >= 0 && last < p.x.size[3]) {
        many(from + left * p.x.stride[3], s, sums, end_of, apart);
        if (end_of) {
          c += kNeighbours;
          continue;
        }
      } else {
        pixels = 1;
        int64_t first, count;
        inside(left, p.dilation[1], S, p.x.size[3], &first, &count);
        if (count == S) {
          one(from + left * p.x.stride[3], s, sums, end_of, apart);
          if (end_of) {
            ++c;
            continue;
          }
        } else {
          alignas(64) float part[kPanelWidth];
          __builtin_memset(sums, 0, static_cast<size_t>(width) * 4);
          for (int64_t row = row_first; row < row_first + rows; ++row) {
            s.first = row * S + first;
            s.count = s.row_taps = count;
            one(from + left * p.x.stride[3], s, part, nullptr, apart);
            for (int64_t k = 0; k < width; k += kLanes) store(sums + k, load(sums + k) + load(part + k));
          }
        }
      }
      if (scales) {
        finish(plan, *scales, *job.pixels, listed, listed + pixels, k0, width, sums);
        listed += pixels;
        c += pixels;
        continue;
      }
      for (int64_t i = 0; i < pixels; ++i, ++c)
        for (int64_t k = 0; k < width; k += kLanes) {
          const Vec v = load(sums + i * kPanelWidth + k) + load(panel.bias + k), slope = load(panel.slope + k);
          store(to + c * p.y.stride[3] + k,
                add ? ended(p.activation, after, v, slope, load(add + c * p.residual.stride[3] + k))
                    : activate(p.activation, slope, v));
        }
    }
  }
}

template <class X>
static void run_straight(const ConvPlan& plan, const ConvJob& job) {
  const Conv2dParams& p = plan.p;
  const int64_t k0 = job.first_panel * kPanelWidth, S = plan.weight.size[3];
  const int64_t width = plan.width_of_panel(job.first_panel);
  int64_t offset[kMaxAxisTaps * kMaxAxisTaps];
  for (int64_t t = 0; t < plan.taps(); ++t)
    offset[t] = t / S * p.dilation[0] * p.x.stride[2] + t % S * p.dilation[1] * p.x.stride[3];
  PanelEnd panel;
  Scales scales;
  if (plan.quantized) {
    list_pixels(plan, job);
    load_scales(plan, nullptr, k0, width, &scales);
  } else {
    load_end<float>(p, k0, width, &panel);
  }
  const float* weights = static_cast<const float*>(job.weights) + plan.panel_offset(0, job.first_panel);
  const bool threes = S == 3 && p.stride[1] == p.dilation[1];
  const Straight s = {0, 0, S, plan.group_in, threes, 0, offset, weights, width};
  int64_t listed = 0;
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    run_rect_straight<X>(plan, job, rect, k0, width, s, panel, plan.quantized ? &scales : nullptr, listed);
    listed += int64_t{rect.height} * rect.width;
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
