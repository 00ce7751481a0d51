// Depthwise convolution of halves by the usual square kernels, with as many outputs as inputs, channels_last. A CTA
// copies what a tile of outputs reads, for a slice of channels, into shared memory: all of it is under way at once, and
// comes once for all taps. Then a thread sums a row of the tile for two channels; the lanes of a warp are neighbours in
// channels. Weights wait in shared memory as float32.
#pragma once
#include "core/settled.h"
#include "cuda/capability.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {

constexpr int kTileWord = 8;          // channels of a copy
constexpr int kTileSliceWords = 8;    // of a CTA at most
constexpr int kTileSharedMost = 100;  // KB

struct TilePlan {
  FastDiv slices;       // of channels, neighbouring CTAs
  FastDiv words;        // of a slice
  FastDiv channels;     // of a slice
  FastDiv pairs;        // of them
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

// One instruction; two conversions that are put together are three.
template <class T>
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
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
    T* at = y + i * p.y.stride[3];
    if (i >= columns) continue;
    if (plan.vector_y)
      *reinterpret_cast<uint32_t*>(at) = to_pair<T>(v[i][0], v[i][1]);
    else
      at[0] = from_float<T>(v[i][0]), at[p.y.stride[1]] = from_float<T>(v[i][1]);
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
  // The count, the first tile, weights and bias are asked for together, and stored when the first copies are under way.
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  OutputTile at = locate_tile<kTile>(p, plan, cta);
  constexpr int kShare = (kTaps * 2 + kTile - 1) / kTile;  // of the weights, of a thread
  T taps[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    uint32_t tap, c;
    plan.channels.divmod(thread + i * threads, &tap, &c);
    const T* weight = static_cast<const T*>(p.weight.data) + (slice + c) * p.weight.stride[0] +
                      tap / kSize * p.weight.stride[2] + tap % kSize * p.weight.stride[3];
    taps[i] = tap < kTaps && static_cast<int>(c) < held ? *weight : from_float<T>(0.f);
  }
  uint32_t y, pair;
  plan.pairs.divmod(thread, &y, &pair);
  const int k = slice + static_cast<int>(pair) * 2;
  const float bias[2] = {k < K ? bias_at<T>(p, k) : 0.f, k < K ? bias_at<T>(p, k + 1) : 0.f};
  const int tiles = count * static_cast<int>(plan.block_tiles.divisor);
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();

  // A thread copies one word of every kStep-th pixel of a patch.
  constexpr int kStep = 4 * kTile;
  uint32_t first_pixel, word;
  plan.words.divmod(thread, &first_pixel, &word);
  if (first_pixel >= kStep) first_pixel = kPatch * kPatch;  // a thread that fills the last warp
  const bool mine = static_cast<int>(word) * kTileWord < held;
  const uint32_t to = shared_address(patch) + thread * 16;
  const int down_x = static_cast<int>(p.x.stride[2]), right_x = static_cast<int>(p.x.stride[3]);
  bool staged = false;
  for (int tile = cta; tile < tiles;) {
    const int row0 = at.row * kStride - p.padding[0], column0 = at.column * kStride - p.padding[1];
    const int down = (at.rows - 1) * kStride + kSize, across = (at.columns - 1) * kStride + kSize;  // that it reads
    const bool some = at.rows > 0 && at.columns > 0;
    // Rows and columns of the patch that are read and lie inside the plane.
    const int top = max(-row0, 0), bottom = some ? min(down, static_cast<int>(p.x.size[2]) - row0) : 0;
    const int left = max(-column0, 0), right = mine ? min(across, static_cast<int>(p.x.size[3]) - column0) : 0;
    const T* x = static_cast<const T*>(p.x.data) + at.n * p.x.stride[0] + row0 * p.x.stride[2] +
                 column0 * p.x.stride[3] + slice + word * kTileWord;
#pragma unroll
    for (int i = 0; i < (kPatch * kPatch + kStep - 1) / kStep; ++i) {
      const int pixel = static_cast<int>(first_pixel) + i * kStep, r = pixel / kPatch, c = pixel - r * kPatch;
      if (pixel >= kPatch * kPatch) break;
      const bool in = (r >= top) & (r < bottom) & (c >= left) & (c < right);
      const T* from = in ? x + (r * down_x + c * right_x) : static_cast<const T*>(p.x.data);
      cp_async_16(to + i * kStep * words * 16, from, in);
    }
    cp_async_commit();
    if (!staged) {
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        if (thread + i * threads < kTaps * width) smem[thread + i * threads] = to_float(taps[i]);
      staged = true;
    }
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
        float2 w[kSize];
#pragma unroll
        for (int s = 0; s < kSize; ++s) w[s] = *reinterpret_cast<const float2*>(weight + s * width);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
          const float2 v = to_floats<T>(*reinterpret_cast<const uint32_t*>(row + j * width));
#pragma unroll
          for (int i = 0; i < kTile; ++i) {
            const int s = j - i * kStride;
            if (s < 0 || s >= kSize) continue;
            sums[i][0] = fmaf(v.x, w[s].x, sums[i][0]);
            sums[i][1] = fmaf(v.y, w[s].y, sums[i][1]);
          }
        }
      }
      finish_pairs<T>(p, plan, sums, output_of(p, {now.n, now.row + static_cast<int>(y), now.column}), now.columns, k);
    }
    __syncthreads();
  }
  // Last, and first by CTAs that had no tile.
  clear_fringe<T>(p, plan.fringe, int64_t{gridDim.x - 1 - blockIdx.x} * threads + thread, int64_t{gridDim.x} * threads);
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
  plan.slices = FastDiv(slices), plan.words = FastDiv(words), plan.channels = FastDiv(words * kTileWord),
  plan.pairs = FastDiv(words * kTileWord / 2);
  plan.block_tiles = FastDiv(rows * in_row), plan.tiles_in_row = FastDiv(in_row);
  plan.fringe = FringePlan(p);
  plan.vector_y = channels_vectorize(p.y);
  plan.vector_residual = p.residual.data && channels_vectorize(p.residual);
  plan.settled = inputs_settled();
  const int threads = static_cast<int>((words * kTileWord / 2 * kTile + 31) / 32 * 32);
  const size_t smem = words * kTileWord * (kSize * kSize * sizeof(float) + kPatch * kPatch * sizeof(T));
  static_assert(kTileSliceWords * kTileWord * (kSize * kSize * sizeof(float) + kPatch * kPatch * sizeof(T)) <=
                    kTileSharedMost * 1024,
                "");
  SBNET_TRY(allow_shared<kernel>(kConvOp, device, kTileSharedMost * 1024));
  const int most =
      select_capability(device) == 90 ? 220 * 1024 : 96 * 1024;  // of a multiprocessor: a guess is good enough
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

// Are distances within an image counted in 31 bits?
inline bool distances_fit(const TensorView& x) {
  const auto reach = [&](int d) { return static_cast<double>(x.size[d]) * static_cast<double>(x.stride[d]); };
  return reach(2) + reach(3) < INT32_MAX;
}

// Tiles of 4x4 where blocks are no wider, else of 8x8.
template <class T, int kSize, int kStride>
Status launch_depthwise_tiles(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool small = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) <= 4;
  return small ? launch_depthwise_tile<T, kSize, kStride, 4>(p, device, stream)
               : launch_depthwise_tile<T, kSize, kStride, 8>(p, device, stream);
}

}  // namespace sbnet::portable
