// Depthwise convolution of the usual square kernels, with as many outputs as inputs, channels_last. A thread computes a
// strip of neighbouring pixels for four channels, of large kernels of halves with stride 1 in two rows, and has two or
// three rows of their input under way at once: a sparse list leaves each multiprocessor few threads, and what they wait
// for is most of the time. A long list is bound by instructions: a row that serves two rows of outputs is loaded and
// made float once.
#pragma once
#include <type_traits>

#include "cuda/masked/conv_portable.cuh"

namespace sbnet::portable {

constexpr int kStrip = 4;  // pixels
constexpr int kSquareThreads = 128;
constexpr int kQuad = 4;         // channels of a thread
constexpr int kSliceQuads = 16;  // of a CTA at most
constexpr int kSquareSlice = kSliceQuads * kQuad;

struct SquarePlan {
  FastDiv slices;        // of channels, neighbouring CTAs
  FastDiv quads;         // of a slice
  FastDiv block_strips;  // strip index -> slot, strip of the block
  FastDiv strips_per_row;
  FringePlan fringe;
  int32_t strips_per_block;
  bool vector_y, vector_residual;
};

// Rows of input under way: as many as registers hold.
template <class T>
SBNET_HOST_DEVICE constexpr int rows_ahead(int size) {
  return size > 5 || (size > 3 && sizeof(T) == 4) ? 2 : 3;
}
// Rows of outputs of a thread: of halves, whose weights and inputs are packed.
template <class T>
SBNET_HOST_DEVICE constexpr int rows_of_strip(int size, int stride) {
  return sizeof(T) == 2 && size > 3 && stride == 1 ? 2 : 1;
}

// The strip's first pixel, and how many columns and rows it has: none where the strip lies off the plane or its row is
// no block.
struct Strip {
  Pixel first;
  int pixels, rows;
};
template <int kDown>
__device__ __forceinline__ Strip locate_strip(const Conv2dParams& p, const SquarePlan& plan, int strip) {
  const BlockGrid& grid = p.active.grid;
  uint32_t slot, rest, row, column;
  plan.block_strips.divmod(strip, &slot, &rest);
  plan.strips_per_row.divmod(rest, &row, &column);
  row *= kDown;
  BlockIndex b;
  if (slot >= p.active.capacity || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b))
    return {};
  const int in_block = static_cast<int>(column) * kStrip;
  const Pixel first{b.n, b.i * grid.size[0] + static_cast<int>(row), b.j * grid.size[1] + in_block};
  const int pixels = min(min(kStrip, grid.size[1] - in_block), static_cast<int>(p.y.size[3]) - first.column);
  const int rows = min(min(kDown, grid.size[0] - static_cast<int>(row)), static_cast<int>(p.y.size[2]) - first.row);
  return {first, rows > 0 ? pixels : 0, rows};
}

// Of kSize x kSize taps, stride kStride, dilation 1; x is channels_last and has as many channels as y.
template <class T, int kSize, int kStride>
__global__ void __launch_bounds__(kSquareThreads, kSize > 3 ? 3 : 4)
    conv_square_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ SquarePlan plan) {
  using Bytes = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
  constexpr int kTaps = kSize * kSize, kColumns = (kStrip - 1) * kStride + kSize;
  constexpr int kDown = rows_of_strip<T>(kSize, kStride), kInputs = (kDown - 1) * kStride + kSize;  // rows
  static_assert(kDown <= 2 && (kDown == 1 || kStride == 1), "");
  constexpr int kAhead = rows_ahead<T>(kSize);
  constexpr int kShares = kSquareThreads / kSquareSlice, kShare = (kTaps + kShares - 1) / kShares;
  static_assert(kSquareThreads % kSquareSlice == 0, "");
  // Where a thread has two rows, reading weights as float32 for each would take as long as the products.
  constexpr bool kPacked = kDown > 1;
  using Weight = std::conditional_t<kPacked, T, float>;
  using Weights = std::conditional_t<kPacked, uint2, float4>;  // of a thread's channels
  __shared__ Weights weights[kTaps][kSliceQuads];
  const int K = static_cast<int>(p.weight.size[0]), thread = threadIdx.x;
  const int quads = static_cast<int>(plan.quads.divisor), slices = static_cast<int>(plan.slices.divisor);
  const int cta = static_cast<int>(plan.slices.quotient(blockIdx.x)), ctas = static_cast<int>(gridDim.x) / slices;
  const int slice = (static_cast<int>(blockIdx.x) - cta * slices) * quads;
  const int strips_per_cta = kSquareThreads / quads, in_cta = static_cast<int>(plan.quads.quotient(thread));
  const int lane = thread - in_cta * quads, k = (slice + lane) * kQuad;

  grid_dependency_wait();
  grid_dependency_release();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kSquareThreads + thread, int64_t{gridDim.x} * kSquareThreads);
  // The list, the weights and the bias are read together: none waits for another.
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  int strip = cta * strips_per_cta + in_cta;
  Strip at = locate_strip<kDown>(p, plan, strip);
  const int staged = slice * kQuad + thread % kSquareSlice, share = thread / kSquareSlice;
  float taps[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int tap = share + i * kShares;
    taps[i] = tap < kTaps && staged < K
                  ? to_float(static_cast<const T*>(
                        p.weight.data)[staged * p.weight.stride[0] + tap / kSize * p.weight.stride[2] +
                                       tap % kSize * p.weight.stride[3]])
                  : 0.f;
  }
  float bias[kQuad];
#pragma unroll
  for (int e = 0; e < kQuad; ++e) bias[e] = bias_at<T>(p, min(k + e, K - 1));
#pragma unroll
  for (int i = 0; i < kShare; ++i)
    if (share + i * kShares < kTaps)
      reinterpret_cast<Weight*>(weights[share + i * kShares])[thread % kSquareSlice] = from_float<Weight>(taps[i]);
  __syncthreads();
  if (k >= K || in_cta >= strips_per_cta) return;

  const int strips = count * plan.strips_per_block, step = ctas * strips_per_cta;
  for (; strip < strips; strip += step, at = locate_strip<kDown>(p, plan, strip)) {
    if (at.pixels <= 0) continue;
    const int row0 = at.first.row * kStride - p.padding[0], column0 = at.first.column * kStride - p.padding[1];
    const int rows = (at.rows - 1) * kStride + kSize, columns = (at.pixels - 1) * kStride + kSize;  // seen by them
    const T* x = static_cast<const T*>(p.x.data) + at.first.n * p.x.stride[0] + row0 * p.x.stride[2] +
                 column0 * p.x.stride[3] + k;
    uint32_t in_columns = 0;  // a bit each
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if ((j < columns) & (static_cast<unsigned>(column0 + j) < static_cast<unsigned>(p.x.size[3])))
        in_columns |= 1u << j;
    float sums[kDown][kStrip][kQuad];
#pragma unroll
    for (int d = 0; d < kDown; ++d)
#pragma unroll
      for (int i = 0; i < kStrip; ++i)
#pragma unroll
        for (int e = 0; e < kQuad; ++e) sums[d][i][e] = bias[e];

    Bytes words[kAhead][kColumns];  // packed: single channels would take a register each
    const auto load = [&](Bytes(&to)[kColumns], int r) {
      const bool in = (r < rows) & (static_cast<unsigned>(row0 + r) < static_cast<unsigned>(p.x.size[2]));
      const T* from = x + r * p.x.stride[2];
      const uint32_t mask = in ? in_columns : 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        to[j] = {};
        if (mask & 1u << j) to[j] = *reinterpret_cast<const Bytes*>(from + j * p.x.stride[3]);
      }
    };
    constexpr int kHeld = kDown > 1 ? kAhead : 1;
    Weights held[kHeld][kSize];  // rows of them
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load(words[u], u);
    // Not unrolled further: all rows of a large kernel would be more code than the instruction cache holds.
#pragma unroll 1
    for (int first = 0; first < kInputs; first += kAhead) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int r = first + u;
        if (kInputs % kAhead && r >= kInputs) break;
        float v[kColumns][kQuad];
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < kQuad; ++e) v[j][e] = to_float(reinterpret_cast<const T*>(&words[u][j])[e]);
        if (kInputs > kAhead && sizeof(T) == 2) load(words[u], r + kAhead);
        const auto add_row = [&](const Weights(&row)[kSize], float (&to)[kStrip][kQuad]) {
#pragma unroll
          for (int s = 0; s < kSize; ++s) {
            const Weight* w = reinterpret_cast<const Weight*>(&row[s]);
#pragma unroll
            for (int i = 0; i < kStrip; ++i)
#pragma unroll
              for (int e = 0; e < kQuad; ++e) to[i][e] = fmaf(v[i * kStride + s][e], to_float(w[e]), to[i][e]);
          }
        };
        // A row of weights serves the upper outputs, then, with the next row of input, the lower ones.
        if (kDown == 1 || r < kSize) {
#pragma unroll
          for (int s = 0; s < kSize; ++s) held[u % kHeld][s] = weights[r * kSize + s][lane];
          add_row(held[u % kHeld], sums[0]);
        }
        if (kDown > 1 && r > 0) add_row(held[(u + kHeld - 1) % kHeld], sums[kDown - 1]);
        if (kInputs > kAhead && sizeof(T) == 4) load(words[u], r + kAhead);  // which needs no other registers
      }
    }

    const Output first = output_of(p, at.first);
#pragma unroll
    for (int d = 0; d < kDown; ++d) {
      Output to[kStrip];
#pragma unroll
      for (int i = 0; i < kStrip; ++i)
        to[i] = i < at.pixels && d < at.rows
                    ? Output{first.y + d * p.y.stride[2] + i * p.y.stride[3],
                             first.residual + d * p.residual.stride[2] + i * p.residual.stride[3]}
                    : Output{-1, 0};
      finish_outputs<T>(p, plan.vector_y, plan.vector_residual, sums[d], to, k, K);
    }
  }
}

// Strips of the active list, `down` rows high: a block has so many in a row and so many rows. A block wider than the
// plane is the only one of its row: no more strips than the plane has.
struct StripCounts {
  int64_t rows, in_row, all;
  explicit StripCounts(const Conv2dParams& p, int down = 1)
      : rows((std::min<int64_t>(p.active.grid.size[0], p.y.size[2]) + down - 1) / down),
        in_row((std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) + kStrip - 1) / kStrip),
        all(p.active.capacity * rows * in_row) {}
};

template <class T, int kSize, int kStride>
Status launch_square(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  const StripCounts strips(p, rows_of_strip<T>(kSize, kStride));
  constexpr auto kernel = conv_square_kernel<T, kSize, kStride>;
  const int64_t all_quads = p.weight.size[0] / kQuad, slices = (all_quads + kSliceQuads - 1) / kSliceQuads;
  SquarePlan plan;
  plan.slices = FastDiv(slices);
  plan.quads = FastDiv((all_quads + slices - 1) / slices);  // slices alike: none of a few channels
  plan.block_strips = FastDiv(strips.rows * strips.in_row);
  plan.strips_per_row = FastDiv(strips.in_row);
  plan.fringe = FringePlan(p);
  plan.strips_per_block = static_cast<int32_t>(strips.rows * strips.in_row);
  plan.vector_y = channels_vectorize(p.y);
  plan.vector_residual = p.residual.data && channels_vectorize(p.residual);

  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kSquareThreads, 0, &cache, &ctas));
  const int64_t strips_per_cta = kSquareThreads / plan.quads.divisor;
  const int64_t most = persistent_grid(device, ctas, (strips.all + strips_per_cta - 1) / strips_per_cta * slices,
                                       plan.fringe.threads(p), kSquareThreads);
  const dim3 grid(static_cast<unsigned>((most + slices - 1) / slices * slices));
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, grid, dim3(kSquareThreads), 0, stream, p, plan));
  return ok_status();
}

}  // namespace sbnet::portable
