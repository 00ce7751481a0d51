// Depthwise convolution of halves by the usual square kernels, with as many outputs as inputs, channels_last. A CTA
// copies what a tile of outputs reads, for a slice of channels, into shared memory: all of it is under way at once, and
// comes once for all taps. Then a thread sums a row of the tile for two channels; the lanes of a warp are neighbours in
// channels. Weights wait in shared memory as float32.
#pragma once
#include "core/settled.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {

constexpr int kTileWord = 8;          // channels of a copy
constexpr int kTileSliceWords = 8;    // of a CTA at most
constexpr int kTileSharedMost = 100;  // KB

struct TilePlan {
  FastDiv slices;       // of channels, neighbouring CTAs
  FastDiv words;        // of a slice
  FastDiv pairs;        // of its channels
  FastDiv block_tiles;  // tile index -> slot, tile of the block
  FastDiv tiles_in_row;
  FringePlan fringe;
  bool vector_y, vector_residual;
  bool settled;  // weights and lists may be read before the launch ahead has ended
};

// Of a block: the first pixel, and how many rows and columns of outputs it has; none where no block or off the plane.
struct OutputTile {
  int n, row, column, rows, columns;
};
template <int kTile>
__device__ __forceinline__ OutputTile locate_tile(const Conv2dParams& p, const TilePlan& plan, int tile) {
  const BlockGrid& grid = p.active.grid;
  uint32_t slot, rest, i, j;
  plan.block_tiles.divmod(tile, &slot, &rest);
  plan.tiles_in_row.divmod(rest, &i, &j);
  BlockIndex b;
  if (slot >= p.active.capacity || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b))
    return {};
  const int down = static_cast<int>(i) * kTile, right = static_cast<int>(j) * kTile;
  const int row = b.i * grid.size[0] + down, column = b.j * grid.size[1] + right;
  return {b.n, row, column, min(min(kTile, grid.size[0] - down), static_cast<int>(p.y.size[2]) - row),
          min(min(kTile, grid.size[1] - right), static_cast<int>(p.y.size[3]) - column)};
}

template <class T>
__device__ __forceinline__ float2 to_floats(uint32_t pair) {
  const T* v = reinterpret_cast<const T*>(&pair);
  return {to_float(v[0]), to_float(v[1])};
}

// y[pixel, k ... k+2) = act(v + residual), or act(v) + residual, of `columns` neighbouring pixels.
template <class T, int kN>
__device__ __forceinline__ void finish_pairs(const Conv2dParams& p, const TilePlan& plan, float (&v)[kN][2],
                                             const Output& first, int columns, int k) {
  const int K = static_cast<int>(p.weight.size[0]);
  const bool after = adds_after(p);
  if (after) activate_channels<T>(p, v, k, K);
  if (p.residual.data) {
    const T* residual = static_cast<const T*>(p.residual.data) + first.residual + k * p.residual.stride[1];
    float2 added[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      added[i] = {0.f, 0.f};
      const T* at = residual + i * p.residual.stride[3];
      if (i < columns)
        added[i] = plan.vector_residual ? to_floats<T>(*reinterpret_cast<const uint32_t*>(at))
                                        : float2{to_float(at[0]), to_float(at[p.residual.stride[1]])};
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i][0] += added[i].x, v[i][1] += added[i].y;
  }
  if (!after) activate_channels<T>(p, v, k, K);
  T* y = static_cast<T*>(p.y.data) + first.y + k * p.y.stride[1];
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    T pair[2] = {from_float<T>(v[i][0]), from_float<T>(v[i][1])};
    T* at = y + i * p.y.stride[3];
    if (i >= columns) continue;
    if (plan.vector_y)
      *reinterpret_cast<uint32_t*>(at) =
          static_cast<uint32_t>(*reinterpret_cast<uint16_t*>(&pair[1])) << 16 | *reinterpret_cast<uint16_t*>(&pair[0]);
    else
      at[0] = pair[0], at[p.y.stride[1]] = pair[1];
  }
}

// Of kSize x kSize taps, dilation 1; kTile x kTile outputs at a time. A CTA has kTile threads a pair of channels.
template <class T, int kSize, int kStride, int kTile>
__global__ void __launch_bounds__(kTile * kTileSliceWords * kTileWord / 2, kTile == 8 ? 4 : 8)
    conv_depthwise_tile_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ TilePlan plan) {
  constexpr int kTaps = kSize * kSize, kPatch = (kTile - 1) * kStride + kSize;
  static_assert(sizeof(T) == 2, "");
  extern __shared__ __align__(16) float smem[];  // weights [taps][slice], then the patch [rows][columns][slice] of T
  const int K = static_cast<int>(p.weight.size[0]), slices = static_cast<int>(plan.slices.divisor);
  const int words = static_cast<int>(plan.words.divisor), width = words * kTileWord;  // of a slice
  const int cta = static_cast<int>(plan.slices.quotient(blockIdx.x)), ctas = static_cast<int>(gridDim.x) / slices;
  const int slice = (static_cast<int>(blockIdx.x) - cta * slices) * width, held = min(K - slice, width);
  const int thread = threadIdx.x, threads = blockDim.x;
  T* patch = reinterpret_cast<T*>(smem + kTaps * width);

  if (!plan.settled) grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = count * static_cast<int>(plan.block_tiles.divisor);
  OutputTile at = {};
  if (cta < tiles) at = locate_tile<kTile>(p, plan, cta);
  uint32_t y, pair;
  plan.pairs.divmod(thread, &y, &pair);
  const int k = slice + static_cast<int>(pair) * 2;
  if (cta < tiles) {
#pragma unroll 4
    for (int i = thread; i < kTaps * width; i += threads) {
      uint32_t tap, c;
      plan.words.divmod(i / kTileWord, &tap, &c);
      c = c * kTileWord + i % kTileWord;
      const T* weight = static_cast<const T*>(p.weight.data) + (slice + c) * p.weight.stride[0] +
                        tap / kSize * p.weight.stride[2] + tap % kSize * p.weight.stride[3];
      smem[i] = static_cast<int>(c) < held ? to_float(*weight) : 0.f;
    }
  }
  const float bias[2] = {k < K ? bias_at<T>(p, k) : 0.f, k < K ? bias_at<T>(p, k + 1) : 0.f};
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * threads + thread, int64_t{gridDim.x} * threads);

  for (int tile = cta; tile < tiles;) {
    const int row0 = at.row * kStride - p.padding[0], column0 = at.column * kStride - p.padding[1];
    const int down = (at.rows - 1) * kStride + kSize, across = (at.columns - 1) * kStride + kSize;  // that it reads
    const T* x =
        static_cast<const T*>(p.x.data) + at.n * p.x.stride[0] + row0 * p.x.stride[2] + column0 * p.x.stride[3] + slice;
    const uint32_t to = shared_address(patch);
    const bool some = at.rows > 0 && at.columns > 0;
    if (some) {
      for (int i = thread; i < kPatch * kPatch * words; i += threads) {
        uint32_t pixel, word;
        plan.words.divmod(i, &pixel, &word);
        const int r = static_cast<int>(pixel) / kPatch, c = static_cast<int>(pixel) % kPatch;
        const bool in = (r < down) & (c < across) & (static_cast<int>(word) * kTileWord < held) &
                        (static_cast<unsigned>(row0 + r) < static_cast<unsigned>(p.x.size[2])) &
                        (static_cast<unsigned>(column0 + c) < static_cast<unsigned>(p.x.size[3]));
        const T* from =
            in ? x + r * p.x.stride[2] + c * p.x.stride[3] + word * kTileWord : static_cast<const T*>(p.x.data);
        cp_async_16(to + i * 16, from, in);
      }
    }
    cp_async_commit();
    const OutputTile now = at;
    tile += ctas;
    if (tile < tiles) at = locate_tile<kTile>(p, plan, tile);  // while the copies are under way
    cp_async_wait<0>();
    __syncthreads();
    if (some && static_cast<int>(y) < now.rows && k < K) {
      float sums[kTile][2];
#pragma unroll
      for (int i = 0; i < kTile; ++i) sums[i][0] = bias[0], sums[i][1] = bias[1];
      const T* row = patch + (static_cast<int>(y) * kStride * kPatch) * width + pair * 2;
      const float* weight = smem + pair * 2;
      // Not unrolled: all rows of a large kernel would be more code than the instruction cache holds.
#pragma unroll 1
      for (int r = 0; r < kSize; ++r, row += kPatch * width, weight += kSize * width) {
        float2 taps[kSize];
#pragma unroll
        for (int s = 0; s < kSize; ++s) taps[s] = *reinterpret_cast<const float2*>(weight + s * width);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
          const float2 v = to_floats<T>(*reinterpret_cast<const uint32_t*>(row + j * width));
#pragma unroll
          for (int i = 0; i < kTile; ++i) {
            const int s = j - i * kStride;
            if (s < 0 || s >= kSize) continue;
            sums[i][0] = fmaf(v.x, taps[s].x, sums[i][0]);
            sums[i][1] = fmaf(v.y, taps[s].y, sums[i][1]);
          }
        }
      }
      finish_pairs<T>(p, plan, sums, output_of(p, {now.n, now.row + static_cast<int>(y), now.column}), now.columns, k);
    }
    __syncthreads();
  }
}

template <class T, int kSize, int kStride, int kTile>
Status launch_depthwise_tile(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kPatch = (kTile - 1) * kStride + kSize;
  constexpr auto kernel = conv_depthwise_tile_kernel<T, kSize, kStride, kTile>;
  const int64_t all_words = p.weight.size[0] / kTileWord, slices = (all_words + kTileSliceWords - 1) / kTileSliceWords;
  const int64_t words = (all_words + slices - 1) / slices;  // slices alike: none of a few channels
  const int64_t rows = (std::min<int64_t>(p.active.grid.size[0], p.y.size[2]) + kTile - 1) / kTile;
  const int64_t in_row = (std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) + kTile - 1) / kTile;
  TilePlan plan;
  plan.slices = FastDiv(slices), plan.words = FastDiv(words), plan.pairs = FastDiv(words * kTileWord / 2);
  plan.block_tiles = FastDiv(rows * in_row), plan.tiles_in_row = FastDiv(in_row);
  plan.fringe = FringePlan(p);
  plan.vector_y = channels_vectorize(p.y);
  plan.vector_residual = p.residual.data && channels_vectorize(p.residual);
  plan.settled = inputs_settled();
  const int threads = static_cast<int>(words * kTileWord / 2 * kTile);
  const size_t smem = words * kTileWord * (kSize * kSize * sizeof(float) + kPatch * kPatch * sizeof(T));
  static_assert(kTileSliceWords * kTileWord * (kSize * kSize * sizeof(float) + kPatch * kPatch * sizeof(T)) <=
                    kTileSharedMost * 1024,
                "");
  SBNET_TRY(allow_shared<kernel>(kConvOp, device, kTileSharedMost * 1024));
  const int most = device.capability == 90 ? 220 * 1024 : 96 * 1024;  // of a multiprocessor: a guess is good enough
  const int ctas = static_cast<int>(std::min<size_t>({most / (smem + 1024), 1024u / threads, 16}));
  const int64_t tiles = p.active.capacity * rows * in_row * slices;
  SBNET_CHECK(tiles <= INT32_MAX / 2, "%s: active: expected at most 2^30 tiles of pixels, got %lld", kConvOp,
              static_cast<long long>(tiles));
  const int64_t grid = persistent_grid(device, std::max(ctas, 1), tiles, plan.fringe.threads(p), threads);
  SBNET_CUDA_TRY(kConvOp,
                 launch_dependent(device, kernel, dim3(static_cast<unsigned>((grid + slices - 1) / slices * slices)),
                                  dim3(threads), smem, stream, p, plan));
  return ok_status();
}

// Tiles of 4x4 where blocks are no wider, else of 8x8.
template <class T, int kSize, int kStride>
Status launch_depthwise_tiles(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool small = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) <= 4;
  return small ? launch_depthwise_tile<T, kSize, kStride, 4>(p, device, stream)
               : launch_depthwise_tile<T, kSize, kStride, 8>(p, device, stream);
}

}  // namespace sbnet::portable
