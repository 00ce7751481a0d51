// Depthwise convolution of float32 by the usual square kernels, with as many outputs as inputs, channels_last (halves:
// conv_depthwise_tile.cuh). A thread computes a strip of neighbouring pixels for four channels, and has two or three
// rows of their input under way at once: a sparse list leaves each multiprocessor few threads, and what they wait for
// is most of the time.
#pragma once
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
SBNET_HOST_DEVICE constexpr int rows_ahead(int size) { return size > 3 ? 2 : 3; }

// The strip's first pixel, and how many it has: none where the strip lies off the plane or its row is no block.
struct Strip {
  Pixel first;
  int pixels;
};
__device__ __forceinline__ Strip locate_strip(const Conv2dParams& p, const SquarePlan& plan, int strip) {
  const BlockGrid& grid = p.active.grid;
  uint32_t slot, rest, row, column;
  plan.block_strips.divmod(strip, &slot, &rest);
  plan.strips_per_row.divmod(rest, &row, &column);
  BlockIndex b;
  if (slot >= p.active.capacity || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b))
    return {};
  const int in_block = static_cast<int>(column) * kStrip;
  const Pixel first{b.n, b.i * grid.size[0] + static_cast<int>(row), b.j * grid.size[1] + in_block};
  const int pixels = min(min(kStrip, grid.size[1] - in_block), static_cast<int>(p.y.size[3]) - first.column);
  return {first, first.row < p.y.size[2] ? pixels : 0};
}

// Of kSize x kSize taps, stride kStride, dilation 1; x is channels_last and has as many channels as y.
template <int kSize, int kStride>
__global__ void __launch_bounds__(kSquareThreads, kSize > 3 ? 3 : 4)
    conv_square_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ SquarePlan plan) {
  using T = float;
  constexpr int kTaps = kSize * kSize, kColumns = (kStrip - 1) * kStride + kSize;
  constexpr int kAhead = rows_ahead(kSize);
  constexpr int kShares = kSquareThreads / kSquareSlice, kShare = (kTaps + kShares - 1) / kShares;
  static_assert(kSquareThreads % kSquareSlice == 0, "");
  __shared__ float4 weights[kTaps][kSliceQuads];
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
  Strip at = locate_strip(p, plan, strip);
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
      reinterpret_cast<float*>(weights[share + i * kShares])[thread % kSquareSlice] = taps[i];
  __syncthreads();
  if (k >= K || in_cta >= strips_per_cta) return;

  const int strips = count * plan.strips_per_block, step = ctas * strips_per_cta;
  for (; strip < strips; strip += step, at = locate_strip(p, plan, strip)) {
    if (at.pixels <= 0) continue;
    const int row0 = at.first.row * kStride - p.padding[0], column0 = at.first.column * kStride - p.padding[1];
    const int columns = (at.pixels - 1) * kStride + kSize;  // seen by them
    const T* x = static_cast<const T*>(p.x.data) + at.first.n * p.x.stride[0] + row0 * p.x.stride[2] +
                 column0 * p.x.stride[3] + k;
    uint32_t in_columns = 0;  // a bit each
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if ((j < columns) & (static_cast<unsigned>(column0 + j) < static_cast<unsigned>(p.x.size[3])))
        in_columns |= 1u << j;
    float sums[kStrip][kQuad];
#pragma unroll
    for (int i = 0; i < kStrip; ++i)
#pragma unroll
      for (int e = 0; e < kQuad; ++e) sums[i][e] = bias[e];

    float4 words[kAhead][kColumns];
    const auto load = [&](float4(&to)[kColumns], int r) {
      const bool in = (r < kSize) & (static_cast<unsigned>(row0 + r) < static_cast<unsigned>(p.x.size[2]));
      const T* from = x + r * p.x.stride[2];
      const uint32_t mask = in ? in_columns : 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        to[j] = {};
        if (mask & 1u << j) to[j] = *reinterpret_cast<const float4*>(from + j * p.x.stride[3]);
      }
    };
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load(words[u], u);
    // Not unrolled further: all rows of a large kernel would be more code than the instruction cache holds.
#pragma unroll 1
    for (int first = 0; first < kSize; first += kAhead) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int r = first + u;
        if (kSize % kAhead && r >= kSize) break;
#pragma unroll
        for (int s = 0; s < kSize; ++s) {
          const float4 weight = weights[r * kSize + s][lane];
          const float* w = reinterpret_cast<const float*>(&weight);
#pragma unroll
          for (int i = 0; i < kStrip; ++i) {
            const float* v = reinterpret_cast<const float*>(&words[u][i * kStride + s]);
#pragma unroll
            for (int e = 0; e < kQuad; ++e) sums[i][e] = fmaf(v[e], w[e], sums[i][e]);
          }
        }
        if (kSize > kAhead) load(words[u], r + kAhead);
      }
    }

    const Output first = output_of(p, at.first);
    Output to[kStrip];
#pragma unroll
    for (int i = 0; i < kStrip; ++i)
      to[i] = i < at.pixels ? Output{first.y + i * p.y.stride[3], first.residual + i * p.residual.stride[3]}
                            : Output{-1, 0};
    finish_outputs<T>(p, plan.vector_y, plan.vector_residual, sums, to, k, K);
  }
}

// Strips of the active list: a block has so many in a row and so many rows. A block wider than the plane is the only
// one of its row: no more strips than the plane has.
struct StripCounts {
  int64_t rows, in_row, all;
  explicit StripCounts(const Conv2dParams& p)
      : rows(std::min<int64_t>(p.active.grid.size[0], p.y.size[2])),
        in_row((std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) + kStrip - 1) / kStrip),
        all(p.active.capacity * rows * in_row) {}
};

template <int kSize, int kStride>
Status launch_square(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  const StripCounts strips(p);
  constexpr auto kernel = conv_square_kernel<kSize, kStride>;
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
