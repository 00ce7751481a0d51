// Convolutions with AMX matrix registers: 16 pixels x 16 output channels x kDepth input channels a product. Included
// once by conv_amx.cpp and conv_int8_amx.cpp, which define what conv_patch.h asks for first, and PanelFinish<T> behind
// it: the epilogue of a panel of output channels, over sums of PanelFinish<T>::Sum.
#pragma once
#include "cpu/simd/tiles.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kProductWeights = kDepth * kLanes;  // elements of a weight matrix: one register

// One tap of kLanes output channels as matrices: row i holds the input channels of a word, kWord * i and on, of each
// output channel.
template <class T>
static void pack_tap(const T* from, int64_t k_stride, int64_t c_stride, int64_t used, int64_t channels, T* to,
                     int64_t width, int64_t lane) {
  constexpr int64_t kWord = 4 / sizeof(T);
  to += lane / kLanes * kProductWeights;
  for (int64_t c0 = 0; c0 < channels; c0 += kDepth, to += width * kDepth, from += kDepth * c_stride) {
    __builtin_memset(to, 0, kProductWeights * sizeof(T));
    const int64_t depth = smaller(kDepth, channels - c0);
    for (int64_t k = 0; k < used; ++k) {
      const T* row = from + k * k_stride;
      if (c_stride == 1 && depth == kDepth)
        for (int64_t c = 0; c < kDepth; c += kWord) __builtin_memcpy(to + c * kLanes + kWord * k, row + c, 4);
      else
        for (int64_t c = 0; c < depth; ++c)
          to[c / kWord * (kWord * kLanes) + kWord * k + c % kWord] = row[c * c_stride];
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

template <class T>
struct PanelFinish;

// G runs of pixels x V vectors of output channels, over all taps and channels of a slice. Registers from 0: sums of
// (run, vector) in that order; 4, 5: inputs; 6, 7: weights.
template <class T, class Sum, int G, int V>
static __attribute__((noinline)) void microkernel(const T* const (&x)[2], int64_t pixel_bytes, const Taps& taps,
                                                  const T* w, Sum* const (&sums)[2], bool first) {
  constexpr int64_t kSumBytes = kPanelWidth * 4;
  const auto at = [&](int i) { return sums[i / V] + i % V * kLanes; };
  begin_sums<G * V>(at, kSumBytes, first);
  for (int64_t t = 0; t < taps.count; ++t)
    for (int64_t c = 0; c < taps.channels; c += kDepth, w += V * kProductWeights) {
      const int64_t from = taps.offset[t] + c;
      SBNET_TILE_LOAD(4, x[0] + from, pixel_bytes);
      SBNET_TILE_LOAD(6, w, kTileBytes);
      SBNET_TILE_DOT(T, 0, 4, 6);
      if constexpr (V == 2) {
        SBNET_TILE_LOAD(7, w + kProductWeights, kTileBytes);
        SBNET_TILE_DOT(T, 1, 4, 7);
      }
      if constexpr (G == 2) {
        SBNET_TILE_LOAD(5, x[1] + from, pixel_bytes);
        if constexpr (V == 2) {
          SBNET_TILE_DOT(T, 2, 5, 6);
          SBNET_TILE_DOT(T, 3, 5, 7);
        } else {
          SBNET_TILE_DOT(T, 1, 5, 6);
        }
      }
    }
  store_sums<G * V>(at, kSumBytes);
}

// A run: neighbouring pixels of one row of a rect. The sums of run i are rows i * run_rows and on.
template <class T>
static void run_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t output_step) {
  using E = Stored<T>;
  using Sum = typename PanelFinish<T>::Sum;
  const ConvPixels& px = *job.pixels;
  const int64_t run_rows = pixels_per_run(plan, kTileRows);
  const TileShapes shapes = tile_shapes(run_rows, kDepth * sizeof(E));
  SBNET_TILE_CONFIGURE(shapes);

  for (int64_t j = 0; j < job.panels; ++j) {
    const int64_t panel = job.first_panel + j, width = plan.width_of_panel(panel), k = panel * kPanelWidth;
    const int64_t channels = smaller(width, plan.group_out - k), k0 = job.group * plan.group_out + k;
    const E* w = weights_of<T>(plan, job, slice, j);
    const NextWeights next = next_weights<T>(plan, job, slice, j);
    Sum* sums = reinterpret_cast<Sum*>(job.sums) + j * plan.sum_rows * kPanelWidth;
    const PanelFinish<T> finish_panel(plan, k0, channels);
    for (int64_t i = 0; i < px.count; sums += 2 * run_rows * kPanelWidth) {
      int64_t begin[3] = {i, i, i};
      int runs = 0;
      for (; runs < 2 && begin[runs] < px.count; ++runs) {
        const int64_t at = begin[runs];
        begin[runs + 1] = at + smaller(run_rows, job.rects[px.rect[at]].width - px.column[at]);
      }
      const E* patch = static_cast<const E*>(slice.inputs);
      const E* const x[2] = {patch + px.patch[begin[0]], patch + px.patch[begin[runs - 1]]};
      Sum* const to[2] = {sums, sums + run_rows * kPanelWidth};
      fetch(next, begin[0], begin[runs], px.count);
      const int64_t pixel_bytes = output_step * plan.patch_channels * sizeof(E);
      if (width == kPanelWidth)
        (runs == 2 ? microkernel<E, Sum, 2, 2> : microkernel<E, Sum, 1, 2>)(x, pixel_bytes, slice.taps, w, to,
                                                                            slice.first);
      else
        (runs == 2 ? microkernel<E, Sum, 2, 1> : microkernel<E, Sum, 1, 1>)(x, pixel_bytes, slice.taps, w, to,
                                                                            slice.first);
      if (slice.last)
        for (int r = 0; r < runs; ++r) finish_panel(plan, px, begin[r], begin[r + 1], k0, channels, to[r]);
      i = begin[runs];
    }
  }
  SBNET_TILE_RELEASE();
}

}  // namespace SBNET_ISA
}  // namespace sbnet
