// 3x3 convolutions of stride 1 by Winograd's F(2x2, 3x3): a 2x2 square of outputs, as far apart as the taps are, takes
// 16 products for each pair of channels where the direct way takes 36. Inputs and weights are transformed to 16 points;
// at each point, the squares of a tile times the weights are a matrix product, by the direct way's microkernel; sums
// are transformed back. (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, arXiv 1509.09308.)
//
// An output depends on its own 3x3 inputs alone: what others hold is not even multiplied by zero. But an infinity makes
// NaN of an infinity less an infinity: what comes out as no finite number, of inputs without NaN, is summed again
// directly. Included by conv_fma.h.
#pragma once
#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kWinogradChannels = 96;  // of a product: weights of a point and panel stay in the first cache

// ---- Weights: G g G', G = (1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1); per panel [point][input channel][width].

// kLanes output channels of a panel, from its k0-th on.
template <class T>
static void pack_winograd_lanes(const WinogradPanel& panel, int64_t k0) {
  const int64_t used = smaller(kLanes, panel.channels - k0), apart = panel.inputs * panel.width;
  float* to = panel.weights + k0;
  for (const WinogradRun* run = panel.runs; run < panel.runs + panel.run_count; ++run) {
    const T* source = static_cast<const T*>(run->filters) + k0 * run->stride[0];
    for (int64_t c = 0; c < run->count; ++c, to += panel.width) {
      alignas(64) float taps[9][kLanes] = {};
      for (int64_t k = 0; k < used; ++k)
        for (int t = 0; t < 9; ++t)
          taps[t][k] =
              widen(source[k * run->stride[0] + c * run->stride[1] + t / 3 * run->stride[2] + t % 3 * run->stride[3]]);
      Vec rows[4][3];
      for (int s = 0; s < 3; ++s) {
        const Vec a = load(taps[s]), b = load(taps[3 + s]), c2 = load(taps[6 + s]), ends = (a + c2) * 0.5f;
        rows[0][s] = a, rows[1][s] = ends + b * 0.5f, rows[2][s] = ends - b * 0.5f, rows[3][s] = c2;
      }
      for (int r = 0; r < 4; ++r) {
        const Vec a = rows[r][0], b = rows[r][1], c2 = rows[r][2], ends = (a + c2) * 0.5f;
        const Vec points[4] = {a, ends + b * 0.5f, ends - b * 0.5f, c2};
        for (int s = 0; s < 4; ++s) store(to + (r * 4 + s) * apart, points[s]);
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
    by_dtype<Half, BFloat>(layout.weight.dtype,
                           [&](auto t) { pack_winograd_lanes<decltype(t)>(panel, k0 % kPanelWidth); });
  }
}

static void pack_panel(const WinogradPanel& panel, DType dtype) {
  for (int64_t k0 = 0; k0 < panel.width; k0 += kLanes)
    by_dtype<Half, BFloat>(dtype, [&](auto t) { pack_winograd_lanes<decltype(t)>(panel, k0); });
}

// ---- Inputs: B' d B, where B' takes d0 - d2, d1 + d2, d2 - d1, d1 - d3.

// kLanes channels of a square's 4x4 inputs, rows `down` and columns `right` elements apart in the patch; points `apart`
// elements apart.
SBNET_INLINE void transform_inputs(const float* patch, int64_t down, int64_t right, float* to, int64_t apart) {
  Vec t[4][4];
  SBNET_UNROLL for (int j = 0; j < 4; ++j) {
    const float* column = patch + j * right;
    const Vec a = load(column), b = load(column + down), c = load(column + 2 * down), d = load(column + 3 * down);
    t[0][j] = a - c, t[1][j] = b + c, t[2][j] = c - b, t[3][j] = b - d;
  }
  SBNET_UNROLL for (int i = 0; i < 4; ++i) {
    store(to + (i * 4 + 0) * apart, t[i][0] - t[i][2]);
    store(to + (i * 4 + 1) * apart, t[i][1] + t[i][2]);
    store(to + (i * 4 + 2) * apart, t[i][2] - t[i][1]);
    store(to + (i * 4 + 3) * apart, t[i][1] - t[i][3]);
  }
}

// ---- Outputs: A' m A, where A' takes m0 + m1 + m2, m1 - m2 - m3. A square's four rows of kPanelWidth; false where
// something is no finite number.
SBNET_INLINE bool transform_sums(const float* sums, int64_t apart, int64_t width, float* to) {
  Vec finite = Vec{};
  for (int64_t v = 0; v < width; v += kLanes) {
    Vec t[2][4];
    SBNET_UNROLL for (int j = 0; j < 4; ++j) {
      const float* at = sums + j * apart + v;
      const Vec b = load(at + 4 * apart), c = load(at + 8 * apart);
      t[0][j] = load(at) + b + c, t[1][j] = b - c - load(at + 12 * apart);
    }
    SBNET_UNROLL for (int i = 0; i < 2; ++i) {
      const Vec left = t[i][0] + t[i][1] + t[i][2], right = t[i][1] - t[i][2] - t[i][3];
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
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t s = 0; s < 3; ++s) {
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
  ConvPixels& px = *job.pixels;
  const TensorView &y = plan.p.y, &residual = plan.p.residual;
  const int32_t* apart = plan.p.dilation;
  px.count = 0;
  int64_t squares = 0;
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    for (int32_t r = 0; r < rect.height; r = next_square(r, apart[0]))
      for (int32_t c = 0; c < rect.width; c = next_square(c, apart[1]), ++squares)
        for (int32_t i = 0; i < 4; ++i) {
          const int32_t down = r + i / 2 * apart[0], right = c + i % 2 * apart[1];
          if (down >= rect.height || right >= rect.width) continue;
          const int64_t row = rect.row + down, column = rect.column + right;
          px.rect[px.count] = static_cast<int32_t>(q);
          px.row[px.count] = down;
          px.column[px.count] = right;
          px.y[px.count] = rect.n * y.stride[0] + row * y.stride[2] + column * y.stride[3];
          if (residual.data)
            px.residual[px.count] =
                rect.n * residual.stride[0] + row * residual.stride[2] + column * residual.stride[3];
          ++px.count;
        }
  }
  return squares;
}

template <class T>
static void gather_inputs(const ConvPlan& plan, const ConvJob& job) {
  const AxisTaps rows = square_axis(plan, 0), columns = square_axis(plan, 1);
  const int32_t* dilation = plan.p.dilation;
  const int64_t stored = (plan.group_in + kLanes - 1) / kLanes * kLanes, apart = plan.squares * stored;
  float* patch = static_cast<float*>(job.patch);
  const int64_t pitch = columns.slots * kLanes;
  for (int64_t c0 = 0; c0 < plan.group_in; c0 += kLanes) {
    float* to = job.inputs + c0;
    for (int64_t q = 0; q < job.rect_count; ++q) {
      const ConvRect& rect = job.rects[q];
      fill_patch<T>(plan, rect, rows, columns, {c0, smaller(kLanes, plan.group_in - c0), 1}, patch);
      for (int32_t r = 0; r < rect.height; r = next_square(r, dilation[0]))
        for (int32_t c = 0; c < rect.width; c = next_square(c, dilation[1]), to += stored)
          transform_inputs(patch + r * pitch + c * kLanes, dilation[0] * pitch, dilation[1] * kLanes, to, apart);
    }
  }
}

template <class T>
static void finish_squares(const ConvPlan& plan, const ConvJob& job, const WinogradPanel& panel) {
  const ConvPixels& px = *job.pixels;
  const int64_t apart = plan.squares * kPanelWidth;
  const int32_t* dilation = plan.p.dilation;
  alignas(64) float outputs[4 * kPanelWidth];
  PanelEnd end;
  load_end<T>(plan.p, panel.k0, panel.channels, &end);
  const float* sums = job.sums;
  int64_t first = 0;
  for (int64_t q = 0; q < job.rect_count; ++q) {
    const ConvRect& rect = job.rects[q];
    for (int32_t r = 0; r < rect.height; r = next_square(r, dilation[0]))
      for (int32_t c = 0; c < rect.width; c = next_square(c, dilation[1]), sums += kPanelWidth) {
        const bool finite = transform_sums(sums, apart, panel.width, outputs);
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

// Sums of all points of the tile's squares.
static void multiply_points(const ConvPlan& plan, const ConvJob& job, int64_t squares, const WinogradPanel& panel) {
  const int64_t stored = (plan.group_in + kLanes - 1) / kLanes * kLanes, width = panel.width;
  const Microkernel micro = microkernel_of<false>(width);
  const float* w = panel.weights;
  Ahead nothing;
  nothing.count = 0;
  for (int point = 0; point < kWinogradPoints; ++point) {
    const float* inputs = job.inputs + point * plan.squares * stored;
    float* const sums = job.sums + point * plan.squares * kPanelWidth;
    WinogradPiece piece;
    piece.run = piece.channel = 0;
    for (bool first = true; next_piece(panel, &piece); first = false) {
      const NextWeights next = {reinterpret_cast<const char*>(w + piece.inputs * width), piece.inputs * width * 4};
      for (int64_t i = 0; i < squares; i += kMicroPixels) {
        int64_t rows[kMicroPixels];
        for (int e = 0; e < kMicroPixels; ++e) rows[e] = (i + e) * stored;
        fetch(next, i, smaller(i + kMicroPixels, squares), squares);
        micro(inputs, rows, piece.taps, w, sums + i * kPanelWidth, first, nothing);
      }
      w += piece.inputs * width;
    }
  }
}

template <class T>
static void run_winograd(const ConvPlan& plan, const ConvJob& job) {
  const int64_t squares = list_squares(plan, job);
  gather_inputs<T>(plan, job);
  float* const packed = const_cast<float*>(static_cast<const float*>(job.weights));
  for (int64_t j = job.first_panel; j < job.first_panel + job.panels; ++j) {
    WinogradRun whole;
    const WinogradPanel panel = plan.block_panels ? plan.block_panels[j] : dense_panel(plan, packed, j, &whole);
    multiply_points(plan, job, squares, panel);
    finish_squares<T>(plan, job, panel);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
