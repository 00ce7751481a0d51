// 3x3 convolutions of stride 1 by Winograd's F(2x2, 3x3): a 2x2 square of outputs, as far apart as the taps are, takes
// 16 products for each pair of channels where the direct way takes 36. Inputs and weights are transformed to 16 points;
// at each point, the squares of a tile times the weights are a matrix product, by the direct way's microkernel; sums
// are transformed back. (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, arXiv 1509.09308.)
//
// F(2x2, 2x2) takes 9 instead of 16 at all points of F(2x2, 3x3) but the third of an axis. 5 taps are 2 and 3, 7 are 2,
// 2 and 3, which share sums and the way back: 49 products instead of 100, and 100 instead of 196, with sums and
// differences of no more than two inputs an axis; F(2x2, 5x5) itself would take 36, and lose several bits. A point has
// several inputs then: an axis has 3, 4, 7 or 10 of all points together, its "terms", in the order of the points.
//
// An output depends on its own inputs alone: what others hold is not even multiplied by zero. But an infinity makes
// NaN of an infinity less an infinity: what comes out as no finite number, of inputs without NaN, is summed again
// directly. Included by conv_fma.h.
#pragma once
#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kWinogradChannels = 96;  // of a product: weights of a point and panel stay in the first cache

template <int N>
struct Number {
  static constexpr int value = N;
};

// f(the side of a kernel).
template <class F>
SBNET_INLINE void by_side(int64_t side, F&& f) {
  side == 2 ? f(Number<2>()) : side == 3 ? f(Number<3>()) : side == 5 ? f(Number<5>()) : f(Number<7>());
}

// The points of an axis' terms.
SBNET_INLINE const int8_t* points_of_terms(int64_t side) {
  static constexpr int8_t kTwo[] = {0, 1, 3}, kThree[] = {0, 1, 2, 3}, kFive[] = {0, 0, 1, 1, 2, 3, 3},
                          kSeven[] = {0, 0, 0, 1, 1, 1, 2, 3, 3, 3};
  return side == 2 ? kTwo : side == 3 ? kThree : side == 5 ? kFive : kSeven;
}

// ---- Weights: G g G', G = (1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1) of three taps, (1 0; 1 1; 0 1) of two; per panel
// [row term][column term][input channel][width].

SBNET_INLINE void add_two_taps(const Vec* g, Vec* p0, Vec* p1, Vec* p3) { *p0 = g[0], *p1 = g[0] + g[1], *p3 = g[1]; }
SBNET_INLINE void add_three_taps(const Vec* g, Vec* p0, Vec* p1, Vec* p2, Vec* p3) {
  const Vec ends = (g[0] + g[2]) * 0.5f;
  *p0 = g[0], *p1 = ends + g[1] * 0.5f, *p2 = ends - g[1] * 0.5f, *p3 = g[2];
}
// An axis of R taps is its parts of two and three, whose terms lie by their points.
template <int R, auto two, auto three>
SBNET_INLINE void transform(const Vec* from, Vec* to) {
  if constexpr (R == 2) {
    two(from, to, to + 1, to + 2);
  } else if constexpr (R == 3) {
    three(from, to, to + 1, to + 2, to + 3);
  } else if constexpr (R == 5) {
    two(from, to, to + 2, to + 5);
    three(from + 2, to + 1, to + 3, to + 4, to + 6);
  } else {
    two(from, to, to + 3, to + 7);
    two(from + 2, to + 1, to + 4, to + 8);
    three(from + 4, to + 2, to + 5, to + 6, to + 9);
  }
}
template <int R>
SBNET_INLINE void transform_taps(const Vec* g, Vec* to) {
  transform<R, add_two_taps, add_three_taps>(g, to);
}

// kLanes output channels of a panel, from its k0-th on. Squares of kLanes x kLanes channels go through a buffer, as in
// pack_tap.
template <class T, int R>
static void pack_winograd_lanes(const WinogradPanel& panel, int64_t k0) {
  constexpr int kTerms = winograd_terms(R);
  const int64_t used = smaller(kLanes, panel.channels - k0), apart = panel.inputs * panel.width;
  float* to = panel.weights + k0;
  for (const WinogradRun* run = panel.runs; run < panel.runs + panel.run_count; ++run) {
    const T* source = static_cast<const T*>(run->filters) + k0 * run->stride[0];
    for (int64_t c0 = 0; c0 < run->count; c0 += kLanes, source += kLanes * run->stride[1]) {
      const int64_t count = smaller(kLanes, run->count - c0);
      alignas(64) float taps[R][R][kLanes][kLanes];  // [column][row][input][output]
      for (int r = 0; r < R; ++r)
        for (int s = 0; s < R; ++s) {
          const T* const tap = source + r * run->stride[2] + s * run->stride[3];
          if (run->stride[0] == 1 && used == kLanes) {  // turned weights: nothing to transpose
            for (int64_t c = 0; c < count; ++c) load_row(taps[s][r][c], tap + c * run->stride[1], 1, kLanes);
            continue;
          }
          alignas(64) float square[kLanes][kLanes + 1] = {};
          for (int64_t k = 0; k < used; ++k) load_row(square[k], tap + k * run->stride[0], run->stride[1], count);
          for (int64_t c = 0; c < count; ++c)
            for (int64_t k = 0; k < kLanes; ++k) taps[s][r][c][k] = square[k][c];
        }
      for (int64_t c = 0; c < count; ++c, to += panel.width) {
        Vec rows[R][kTerms], column[R], terms[kTerms];  // of each column of taps, the terms of its rows
        for (int s = 0; s < R; ++s) {
          for (int r = 0; r < R; ++r) column[r] = load(taps[s][r][c]);
          transform_taps<R>(column, rows[s]);
        }
        for (int i = 0; i < kTerms; ++i) {
          for (int s = 0; s < R; ++s) column[s] = rows[s][i];
          transform_taps<R>(column, terms);
          for (int j = 0; j < kTerms; ++j) store(to + (i * kTerms + j) * apart, terms[j]);
        }
      }
    }
  }
}

// A panel of dense weights; `whole` is its only run.
static WinogradPanel dense_panel(const ConvLayout& layout, float* packed, int64_t panel, WinogradRun* whole) {
  const TensorView& w = layout.weight;
  const int64_t k0 = panel * kPanelWidth, width = layout.width_of_panel(panel);
  const int64_t first = k0 * w.stride[0] * dtype_size(w.dtype);
  *whole = {0,
            layout.group_in,
            static_cast<const char*>(w.data) + first,
            {w.stride[0], w.stride[1], w.stride[2], w.stride[3]}};
  const int64_t channels = smaller(width, layout.group_out - k0);
  return {k0, channels, width, whole, 1, layout.group_in, packed + layout.winograd_offset(panel)};
}

static void pack_winograd(const ConvLayout& layout, float* packed, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    WinogradRun whole;
    const int64_t k0 = i * kLanes;
    const WinogradPanel panel = dense_panel(layout, packed, k0 / kPanelWidth, &whole);
    by_dtype<Half, BFloat>(layout.weight.dtype, [&](auto t) {
      by_side(layout.weight.size[2],
              [&](auto side) { pack_winograd_lanes<decltype(t), decltype(side)::value>(panel, k0 % kPanelWidth); });
    });
  }
}

static void pack_panel(const WinogradPanel& panel, DType dtype) {
  for (int64_t k0 = 0; k0 < panel.width; k0 += kLanes)
    by_dtype<Half, BFloat>(dtype, [&](auto t) { pack_winograd_lanes<decltype(t), 3>(panel, k0); });
}

// ---- Inputs: B' d B, where B' takes d0 - d2, d1 + d2, d2 - d1, d1 - d3 for three taps, d0 - d1, d1, d1 - d2 for two.

SBNET_INLINE void add_inputs_of_two(const Vec* d, Vec* p0, Vec* p1, Vec* p3) {
  *p0 = d[0] - d[1], *p1 = d[1], *p3 = d[1] - d[2];
}
SBNET_INLINE void add_inputs_of_three(const Vec* d, Vec* p0, Vec* p1, Vec* p2, Vec* p3) {
  *p0 = d[0] - d[2], *p1 = d[1] + d[2], *p2 = d[2] - d[1], *p3 = d[1] - d[3];
}
template <int R>
SBNET_INLINE void transform_axis(const Vec* d, Vec* to) {
  transform<R, add_inputs_of_two, add_inputs_of_three>(d, to);
}

// kLanes channels of a square's inputs, rows `down` and columns `right` elements apart in the patch; terms `apart`
// elements apart.
template <int R>
static void transform_inputs(const float* patch, int64_t down, int64_t right, float* to, int64_t apart) {
  constexpr int kTerms = winograd_terms(R);
  Vec rows[R + 1][kTerms], line[R + 1], terms[kTerms];
  SBNET_UNROLL for (int j = 0; j <= R; ++j) {
    SBNET_UNROLL for (int i = 0; i <= R; ++i) line[i] = load(patch + i * down + j * right);
    transform_axis<R>(line, rows[j]);
  }
  SBNET_UNROLL for (int i = 0; i < kTerms; ++i) {
    SBNET_UNROLL for (int j = 0; j <= R; ++j) line[j] = rows[j][i];
    transform_axis<R>(line, terms);
    SBNET_UNROLL for (int j = 0; j < kTerms; ++j) store(to + (i * kTerms + j) * apart, terms[j]);
  }
}

// ---- Outputs: A' m A, where A' takes m0 + m1 + m2, m1 - m2 - m3. A square's four rows of kPanelWidth; false where
// something is no finite number.
template <bool kThird>
static bool transform_sums(const float* sums, int64_t apart, int64_t width, float* to) {
  Vec finite = Vec{};
  for (int64_t v = 0; v < width; v += kLanes) {
    Vec t[2][4];
    SBNET_UNROLL for (int j = 0; j < 4; ++j) {
      if (!kThird && j == 2) continue;
      const float* at = sums + j * apart + v;
      const Vec b = load(at + 4 * apart), c = kThird ? load(at + 8 * apart) : Vec{};
      t[0][j] = load(at) + b + c, t[1][j] = b - c - load(at + 12 * apart);
    }
    SBNET_UNROLL for (int i = 0; i < 2; ++i) {
      const Vec c = kThird ? t[i][2] : Vec{};
      const Vec left = t[i][0] + t[i][1] + c, right = t[i][1] - c - t[i][3];
      store(to + i * 2 * kPanelWidth + v, left);
      store(to + (i * 2 + 1) * kPanelWidth + v, right);
      finite += left * 0.0f + right * 0.0f;
    }
  }
  alignas(64) float lanes[kLanes];
  store(lanes, finite);
  float all = 0;
  for (int i = 0; i < kLanes; ++i) all += lanes[i];
  return all == 0;
}

// f(x of an input channel, its weight's offset from the run's filters) for all of a run that a pixel reads inside of
// the plane.
template <class T, class F>
SBNET_INLINE void for_inputs(const ConvPlan& plan, const ConvRect& rect, int32_t row, int32_t column,
                             const WinogradRun& run, F&& f) {
  const TensorView& x = plan.p.x;
  for (int64_t r = 0; r < plan.weight.size[2]; ++r)
    for (int64_t s = 0; s < plan.weight.size[3]; ++s) {
      const int64_t y = rect.row + row + r * plan.p.dilation[0] - plan.p.padding[0];
      const int64_t at = rect.column + column + s * plan.p.dilation[1] - plan.p.padding[1];
      if (y < 0 || y >= x.size[2] || at < 0 || at >= x.size[3]) continue;
      const T* pixel = static_cast<const T*>(x.data) + rect.n * x.stride[0] + y * x.stride[2] + at * x.stride[3] +
                       run.first * x.stride[1];
      for (int64_t c = 0; c < run.count; ++c)
        f(widen(pixel[c * x.stride[1]]), c * run.stride[1] + r * run.stride[2] + s * run.stride[3]);
    }
}

// What is no finite number among a pixel's sums, directly: of inputs with a NaN all sums are NaN already.
template <class T>
static __attribute__((noinline)) void sum_again(const ConvPlan& plan, const ConvRect& rect, int32_t row, int32_t column,
                                                const WinogradPanel& panel, float* sums) {
  bool nan = false;
  const WinogradRun* const end = panel.runs + panel.run_count;
  for (const WinogradRun* run = panel.runs; run < end; ++run)
    for_inputs<T>(plan, rect, row, column, *run, [&](float v, int64_t) { nan |= v != v; });
  for (int64_t k = 0; k < panel.channels && !nan; ++k) {
    if (sums[k] - sums[k] == 0) continue;
    float sum = 0;
    for (const WinogradRun* run = panel.runs; run < end; ++run) {
      const T* filters = static_cast<const T*>(run->filters) + k * run->stride[0];
      for_inputs<T>(plan, rect, row, column, *run, [&](float v, int64_t at) { sum += v * widen(filters[at]); });
    }
    sums[k] = sum;
  }
}

// ---- One job.

// Where the square after that at `at` begins, on an axis: squares begin in every second run of `dilation` neighbours.
SBNET_INLINE int32_t next_square(int32_t at, int32_t dilation) {
  ++at;
  return at / dilation % 2 ? at + dilation : at;
}

// The pixels of a tile, square by square; squares of clipped rects have fewer than four. Returns the number of squares.
static int64_t list_squares(const ConvPlan& plan, const ConvJob& job) {
  const int32_t* apart = plan.p.dilation;
  job.pixels->count = 0;
  int64_t squares = 0;
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    for (int32_t r = 0; r < rect.height; r = next_square(r, apart[0]))
      for (int32_t c = 0; c < rect.width; c = next_square(c, apart[1]), ++squares)
        for (int32_t i = 0; i < 4; ++i) {
          const int32_t down = r + i / 2 * apart[0], right = c + i % 2 * apart[1];
          if (down < rect.height && right < rect.width) list_pixel(plan, job, q, down, right);
        }
  }
  return squares;
}

// Channels [first, end) of all squares.
template <class T, int R>
static void gather_inputs(const ConvPlan& plan, const ConvJob& job, int64_t first, int64_t end) {
  const AxisTaps rows = square_axis(plan, 0), columns = square_axis(plan, 1);
  const int32_t* dilation = plan.p.dilation;
  const int64_t stored = plan.square_channels, apart = plan.squares * stored;
  float* patch = static_cast<float*>(job.patch);
  const int64_t pitch = columns.slots * kLanes;
  for (int64_t c0 = first; c0 < end; c0 += kLanes) {
    float* to = job.inputs + c0 - first;
    for (int64_t q = 0; q < job.rect_count; ++q) {
      const ConvRect& rect = job.rects[q];
      fill_patch<T>(plan, rect, rows, columns, {c0, smaller(kLanes, end - c0), 1}, patch);
      for (int32_t r = 0; r < rect.height; r = next_square(r, dilation[0]))
        for (int32_t c = 0; c < rect.width; c = next_square(c, dilation[1]), to += stored)
          transform_inputs<R>(patch + r * pitch + c * kLanes, dilation[0] * pitch, dilation[1] * kLanes, to, apart);
    }
  }
}

template <class T>
static void finish_squares(const ConvPlan& plan, const ConvJob& job, const WinogradPanel& panel, const float* sums) {
  const ConvPixels& px = *job.pixels;
  const int64_t apart = plan.squares * kPanelWidth;
  const int32_t* dilation = plan.p.dilation;
  alignas(64) float outputs[4 * kPanelWidth];
  PanelEnd end;
  load_end<T>(plan.p, panel.k0, panel.channels, &end);
  const auto back = plan.weight.size[2] == 2 ? transform_sums<false> : transform_sums<true>;
  int64_t first = 0;
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    for (int32_t r = 0; r < rect.height; r = next_square(r, dilation[0]))
      for (int32_t c = 0; c < rect.width; c = next_square(c, dilation[1]), sums += kPanelWidth) {
        const bool finite = back(sums, apart, panel.width, outputs);
        const bool below = r + dilation[0] < rect.height, beside = c + dilation[1] < rect.width;
        const int64_t count = (below ? 2 : 1) * (beside ? 2 : 1);
        if (below && !beside) __builtin_memcpy(outputs + kPanelWidth, outputs + 2 * kPanelWidth, panel.width * 4);
        if (!finite)
          for (int64_t i = 0; i < count; ++i)
            sum_again<T>(plan, rect, px.row[first + i], px.column[first + i], panel, outputs + i * kPanelWidth);
        finish<T>(plan, px, first, first + count, panel.k0, panel.channels, end, outputs);
        first += count;
      }
  }
}

// What one call of a microkernel sums: a part of a long run, or short runs of one length together.
struct WinogradPiece {
  int64_t run, channel;  // where it begins
  int64_t inputs;
  Taps taps;
};

// The piece at piece->run and piece->channel; moves them to the next. False where the panel ends.
static bool next_piece(const WinogradPanel& panel, WinogradPiece* piece) {
  if (piece->run == panel.run_count) return false;
  const WinogradRun* run = panel.runs + piece->run;
  const int64_t parts = (run->count + kWinogradChannels - 1) / kWinogradChannels;
  Taps& taps = piece->taps;
  taps.channels = smaller((run->count + parts - 1) / parts, run->count - piece->channel);
  taps.offset[0] = run->first + piece->channel;
  taps.count = 1;
  piece->inputs = taps.channels;
  piece->channel += taps.channels;
  if (piece->channel < run->count) return true;
  piece->channel = 0;
  ++piece->run;
  while (parts == 1 && piece->run < panel.run_count && panel.runs[piece->run].count == taps.channels &&
         piece->inputs + taps.channels <= kWinogradChannels && taps.count < kMaxAxisTaps * kMaxAxisTaps) {
    taps.offset[taps.count++] = panel.runs[piece->run++].first;
    piece->inputs += taps.channels;
  }
  return true;
}

// Sums of all points of the tile's squares, of the inputs [c0, ...) that are there.
static void multiply_points(const ConvPlan& plan, const ConvJob& job, int64_t squares, const WinogradPanel& panel,
                            int64_t c0, float* sums) {
  const int64_t stored = plan.square_channels, width = panel.width, side = plan.weight.size[2];
  const int64_t terms = winograd_terms(side);
  const int8_t* points = points_of_terms(side);
  const Microkernel micro = microkernel_of<false>(width);
  Ahead nothing;
  nothing.count = 0;
  for (int64_t i = 0; i < terms; ++i)
    for (int64_t j = 0; j < terms; ++j) {
      const int64_t term = i * terms + j;
      const float* inputs = job.inputs + term * plan.squares * stored;
      const float* w = panel.weights + (term * panel.inputs + c0) * width;
      float* const to = sums + (points[i] * 4 + points[j]) * plan.squares * kPanelWidth;
      const bool new_row = i == 0 || points[i] != points[i - 1], new_column = j == 0 || points[j] != points[j - 1];
      WinogradPiece piece;
      piece.run = piece.channel = 0;
      for (bool first = c0 == 0 && new_row && new_column; next_piece(panel, &piece); first = false) {
        const NextWeights next = {reinterpret_cast<const char*>(w + piece.inputs * width), piece.inputs * width * 4};
        for (int64_t q = 0; q < squares; q += kMicroPixels) {
          int64_t rows[kMicroPixels];
          for (int e = 0; e < kMicroPixels; ++e) rows[e] = (q + e) * stored;
          fetch(next, q, smaller(q + kMicroPixels, squares), squares);
          micro(inputs, rows, piece.taps, w, to + q * kPanelWidth, first, nothing);
        }
        w += piece.inputs * width;
      }
    }
}

template <class T>
static void run_winograd(const ConvPlan& plan, const ConvJob& job) {
  const int64_t squares = list_squares(plan, job);
  float* const packed = const_cast<float*>(static_cast<const float*>(job.weights));
  const int64_t kept = plan.square_channels < plan.group_in ? plan.sum_rows * kPanelWidth : 0;
  for (int64_t c0 = 0; c0 < plan.group_in; c0 += plan.square_channels) {
    const int64_t end = smaller(c0 + plan.square_channels, plan.group_in);
    by_side(plan.weight.size[2], [&](auto side) { gather_inputs<T, decltype(side)::value>(plan, job, c0, end); });
    for (int64_t j = 0; j < job.panels; ++j) {
      const int64_t at = job.first_panel + j;
      float* const sums = job.sums + j * kept;
      WinogradRun whole;
      const WinogradPanel panel = plan.block_panels ? plan.block_panels[at] : dense_panel(plan, packed, at, &whole);
      if (!plan.block_panels) whole.count = end - c0;
      multiply_points(plan, job, squares, panel, c0, sums);
      whole.count = plan.group_in;
      if (end == plan.group_in) finish_squares<T>(plan, job, panel, sums);
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
