// The convolution of float16 and bfloat16 with AMX matrix registers: 16 pixels x 16 output channels x 32 input channels
// a product, sums in float32. Compiled like conv_avx512.cpp.
#if defined(SBNET_AMX)
#define SBNET_ISA conv_amx
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#include "cpu/simd/tiles.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kDepth = 32;
constexpr int kZeroByte = 0;
constexpr int64_t kProductWeights = kDepth * kLanes;  // elements of a weight matrix: one register

template <class T>
using Stored = T;  // no arithmetic but in the matrix registers

template <class T>
SBNET_INLINE void put(T* to, T from, float) {
  *to = from;
}
template <class T>
SBNET_INLINE void put_row(T* to, const T* from, int64_t count, float) {
  __builtin_memcpy(to, from, count * sizeof(T));
}

// One tap of kLanes output channels as matrices: row i holds input channels 2i and 2i + 1 of each output channel.
template <class T>
static void pack_tap(const T* from, int64_t k_stride, int64_t c_stride, int64_t used, int64_t channels, T* to,
                     int64_t width, int64_t lane) {
  to += lane / kLanes * kProductWeights;
  for (int64_t c0 = 0; c0 < channels; c0 += kDepth, to += width * kDepth, from += kDepth * c_stride) {
    __builtin_memset(to, 0, kProductWeights * sizeof(T));
    const int64_t depth = smaller(kDepth, channels - c0);
    for (int64_t k = 0; k < used; ++k) {
      const T* row = from + k * k_stride;
      if (c_stride == 1 && depth == kDepth)
        for (int64_t c = 0; c < kDepth; c += 2) __builtin_memcpy(to + c * kLanes + 2 * k, row + c, 2 * sizeof(T));
      else
        for (int64_t c = 0; c < depth; ++c) to[c / 2 * (2 * kLanes) + 2 * k + c % 2] = row[c * c_stride];
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

// G runs of pixels x V vectors of output channels, over all taps and channels of a slice. Registers 0..3: sums of (run,
// vector) = (0,0) (0,1) (1,0) (1,1); 4, 5: inputs; 6, 7: weights.
template <class T, int G, int V>
static __attribute__((noinline)) void microkernel(const T* const (&x)[2], int64_t pixel_bytes, const Taps& taps,
                                                  const T* w, float* const (&sums)[2], bool first) {
  constexpr int64_t kSumBytes = kPanelWidth * 4;
  if (first) {
    SBNET_TILE_ZERO(0);
    SBNET_TILE_ZERO(1);
    SBNET_TILE_ZERO(2);
    SBNET_TILE_ZERO(3);
  } else {
    SBNET_TILE_LOAD(0, sums[0], kSumBytes);
    if constexpr (V == 2) SBNET_TILE_LOAD(1, sums[0] + kLanes, kSumBytes);
    if constexpr (G == 2) SBNET_TILE_LOAD(2, sums[1], kSumBytes);
    if constexpr (G == 2 && V == 2) SBNET_TILE_LOAD(3, sums[1] + kLanes, kSumBytes);
  }
  for (int64_t t = 0; t < taps.count; ++t)
    for (int64_t c = 0; c < taps.channels; c += kDepth, w += V * kProductWeights) {
      const int64_t at = taps.offset[t] + c;
      SBNET_TILE_LOAD(4, x[0] + at, pixel_bytes);
      SBNET_TILE_LOAD(6, w, kTileBytes);
      SBNET_TILE_DOT(T, 0, 4, 6);
      if constexpr (V == 2) {
        SBNET_TILE_LOAD(7, w + kProductWeights, kTileBytes);
        SBNET_TILE_DOT(T, 1, 4, 7);
      }
      if constexpr (G == 2) {
        SBNET_TILE_LOAD(5, x[1] + at, pixel_bytes);
        SBNET_TILE_DOT(T, 2, 5, 6);
        if constexpr (V == 2) SBNET_TILE_DOT(T, 3, 5, 7);
      }
    }
  SBNET_TILE_STORE(0, sums[0], kSumBytes);
  if constexpr (V == 2) SBNET_TILE_STORE(1, sums[0] + kLanes, kSumBytes);
  if constexpr (G == 2) SBNET_TILE_STORE(2, sums[1], kSumBytes);
  if constexpr (G == 2 && V == 2) SBNET_TILE_STORE(3, sums[1] + kLanes, kSumBytes);
}

// A run: neighbouring pixels of one row of a rect. The sums of run i are rows i * run_rows and on.
template <class T>
static void run_slice(const ConvPlan& plan, const ConvJob& job, const Slice& slice, int64_t output_step) {
  const ConvPixels& px = *job.pixels;
  const int64_t run_rows = pixels_per_run(plan, kTileRows);
  const TileShapes shapes = tile_shapes(run_rows, kDepth * sizeof(T));
  SBNET_TILE_CONFIGURE(shapes);

  for (int64_t j = 0; j < job.panels; ++j) {
    const int64_t panel = job.first_panel + j, width = plan.width_of_panel(panel), k = panel * kPanelWidth;
    const int64_t channels = smaller(width, plan.group_out - k), k0 = job.group * plan.group_out + k;
    const T* w = weights_of<T>(plan, job, slice, j);
    const NextWeights next = next_weights<T>(plan, job, slice, j);
    float* sums = job.sums + j * plan.sum_rows * kPanelWidth;
    PanelEnd end;
    if (slice.last) load_end<T>(plan.p, k0, channels, &end);
    for (int64_t i = 0; i < px.count; sums += 2 * run_rows * kPanelWidth) {
      int64_t begin[3] = {i, i, i};
      int runs = 0;
      for (; runs < 2 && begin[runs] < px.count; ++runs) {
        const int64_t at = begin[runs];
        begin[runs + 1] = at + smaller(run_rows, job.rects[px.rect[at]].width - px.column[at]);
      }
      const T* patch = static_cast<const T*>(slice.inputs);
      const T* const x[2] = {patch + px.patch[begin[0]], patch + px.patch[begin[runs - 1]]};
      float* const to[2] = {sums, sums + run_rows * kPanelWidth};
      fetch(next, begin[0], begin[runs], px.count);
      const int64_t pixel_bytes = output_step * plan.patch_channels * 2;
      if (width == kPanelWidth)
        (runs == 2 ? microkernel<T, 2, 2> : microkernel<T, 1, 2>)(x, pixel_bytes, slice.taps, w, to, slice.first);
      else
        (runs == 2 ? microkernel<T, 2, 1> : microkernel<T, 1, 1>)(x, pixel_bytes, slice.taps, w, to, slice.first);
      if (slice.last)
        for (int r = 0; r < runs; ++r) finish<T>(plan, px, begin[r], begin[r + 1], k0, channels, end, to[r]);
      i = begin[runs];
    }
  }
  SBNET_TILE_RELEASE();
}

static void run_amx_job(const ConvPlan& plan, const ConvJob& job) {
  if (plan.p.x.dtype == DType::kF16)
    run<Half>(plan, job);
  else
    run<BFloat>(plan, job);
}

static void pack_all(const ConvLayout& layout, void* packed, int64_t begin, int64_t end) {
  if (layout.weight.dtype == DType::kF16)
    pack_weights<Half>(layout, packed, begin, end);
  else
    pack_weights<BFloat>(layout, packed, begin, end);
}

}  // namespace SBNET_ISA

const ConvKernels kConvKernelsAmx = {{SBNET_LANES, SBNET_VECTORS, conv_amx::kDepth, 2, conv_amx::kTileRows},
                                     conv_amx::pack_all,
                                     conv_amx::run_amx_job,
                                     nullptr};
}  // namespace sbnet
#endif
