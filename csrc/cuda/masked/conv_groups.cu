// 3x3 convolutions of many small groups, 4 to 32 channels each, with what every GPU since sm_80 has: mma.sync,
// ldmatrix, cp.async.
//
// A unit is a cell of 8x8 outputs by four warps' channels. Its patch of x, the halo with it, comes to shared memory
// once, and each warp multiplies the channels of its own group alone: the reduction is a list of words, eight channels
// of a tap each, two of which are a step of mma.sync. So no product is with another group's zeros (but of groups of
// four channels, of which two share a word). A CTA keeps to its channels, whose weights stay in registers, and goes
// from cell to cell; the next cell's patch comes in meanwhile.
//
// A fragment is two rows of eight outputs. Word w of a pixel lies at w ^ key, by its place in the row, so that the
// eight pixels that a matrix takes are free of bank conflicts; with a stride of 2 even columns come first.
#include "cuda/masked/conv_patch_shape.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kCell = 8, kGroupWarps = 4, kGroupThreads = kGroupWarps * 32, kTaps = 9;

// kWords: of a group's input channels; kTiles: of eight output channels, of a warp; kShared: two groups have a word.
template <int kWords_, int kTiles_, bool kMerged_, int kStride_, int kCtas_>
struct GroupShape {
  static constexpr int kWords = kWords_, kTiles = kTiles_, kStride = kStride_, kCtas = kCtas_;
  static constexpr bool kMerged = kMerged_;
  static constexpr int kChannels = kGroupWarps * kTiles * 8, kPixelBytes = kChannels * 2, kPixelWords = kChannels / 8;
  static constexpr int kSide = (kCell - 1) * kStride + 3, kPixels = kSide * kSide, kStage = kPixels * kPixelBytes;
  static constexpr int kUnits = kTaps * kWords, kSteps = (kUnits + 1) / 2, kFragments = kCell / 2;
  // Threads copy whole rows of the patch, so that each stays in its column.
  static constexpr int kRowThreads = kSide * kPixelWords, kPieces = (kRowThreads + kGroupThreads - 1) / kGroupThreads,
                       kRows = kPieces > 1 ? 1 : kGroupThreads / kRowThreads, kPasses = (kSide + kRows - 1) / kRows;
  static constexpr int kZeros = 2 * kStage, kBytes = kZeros + 16;
  static constexpr int kGroup = kMerged ? 4 : kWords * 8;  // channels
  static_assert(kBytes <= 99 * 1024 && kPixelWords % kWords == 0 && (kMerged || kGroup % (kTiles * 8) == 0), "");

  static __device__ __forceinline__ int place(int column) {
    return kStride == 1 ? column : column % 2 * ((kSide + 1) / 2) + column / 2;
  }
  static __device__ __forceinline__ int key(int place) { return kPixelWords == 4 ? place / 2 % 4 : place % 8; }
  // Where a word of the patch lies.
  static __device__ __forceinline__ int at(int row, int column, int word) {
    const int to = place(column);
    return (row * kSide + to) * kPixelBytes + ((word ^ key(to)) << 4);
  }
};

struct Cell {
  int n, row, column;  // n < 0: no block of the list has it
};

__device__ __forceinline__ bool is_finite(float v) { return v - v == 0.f; }

// Two values as one word.
template <class T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  const T v[2] = {from_float<T>(low), from_float<T>(high)};
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(v[1])) << 16 | reinterpret_cast<const uint16_t&>(v[0]);
}

template <class T>
__device__ __noinline__ float own_sum(const Conv2dParams& p, int n, int row, int column, int k) {
  const int group = k / static_cast<int>(p.weight.size[1]);
  const T* weight = static_cast<const T*>(p.weight.data) + k * kTaps * p.weight.size[1];
  float sum = 0.f;
  for (int tap = 0; tap < kTaps; ++tap) {
    const int r = row + tap / 3, s = column + tap % 3;
    if (static_cast<unsigned>(r) >= static_cast<unsigned>(p.x.size[2]) ||
        static_cast<unsigned>(s) >= static_cast<unsigned>(p.x.size[3]))
      continue;
    const T* pixel = static_cast<const T*>(p.x.data) + n * p.x.stride[0] + r * p.x.stride[2] + s * p.x.stride[3];
    for (int64_t c = 0; c < p.weight.size[1]; ++c)
      sum += to_float(pixel[group * p.weight.size[1] + c]) * to_float(weight[tap * p.weight.size[1] + c]);
  }
  return sum;
}

template <class T, class G>
struct GroupUnits {
  const Conv2dParams& p;
  const PatchPlan& plan;
  const int column, cells;  // of channels; cells of the list
  const uint32_t stages;
  int warp, lane, first_channel;  // of the warp
  uint32_t weights[G::kSteps][G::kTiles][2];
  float bias[G::kTiles][2];
  uint32_t from[G::kSteps];  // this lane's row of a fragment's matrix, relative to the stage; the first fragment's

  __device__ __forceinline__ GroupUnits(const Conv2dParams& p, const PatchPlan& plan, char* smem, int column, int cells)
      : p(p),
        plan(plan),
        column(column),
        cells(cells),
        stages(shared_address(smem)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        first_channel((column * kGroupWarps + warp) * G::kTiles * 8) {
    if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(smem + G::kZeros)[threadIdx.x] = 0;
    const T* w = static_cast<const T*>(p.weight.data);
#pragma unroll
    for (int tile = 0; tile < G::kTiles; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) bias[tile][e] = bias_at<T>(p, first_channel + tile * 8 + lane % 4 * 2 + e);
#pragma unroll
    for (int step = 0; step < G::kSteps; ++step)
#pragma unroll
      for (int tile = 0; tile < G::kTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int unit = step * 2 + half, k = first_channel + tile * 8 + lane / 4;
          int c = unit % G::kWords * 8 + lane % 4 * 2;
          bool own = unit < G::kUnits;
          if constexpr (G::kMerged) own &= c / 4 == k / 4 % 2, c %= 4;
          weights[step][tile][half] =
              own ? *reinterpret_cast<const uint32_t*>(w + (int64_t{k} * kTaps + unit / G::kWords) * G::kGroup + c) : 0;
        }
    const int first_word = (G::kMerged ? warp : warp * G::kTiles * 8 / G::kGroup * G::kWords);
#pragma unroll
    for (int step = 0; step < G::kSteps; ++step) {
      const int unit = step * 2 + lane / 16, tap = unit / G::kWords;
      from[step] = unit < G::kUnits ? G::at(lane / 8 % 2 * G::kStride + tap / 3, lane % 8 * G::kStride + tap % 3,
                                            first_word + unit % G::kWords)
                                    : G::kZeros;
    }
  }

  __device__ __forceinline__ Cell locate(int cell) const {
    uint32_t slot, rest, down, across;
    plan.cells_per_block.divmod(static_cast<uint32_t>(cell), &slot, &rest);
    plan.cells_per_row.divmod(rest, &down, &across);
    BlockIndex b;
    const bool is = load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), p.active.grid, &b);
    return {is ? b.n : -1, b.i * p.active.grid.size[0] + static_cast<int>(down) * kCell,
            b.j * p.active.grid.size[1] + static_cast<int>(across) * kCell};
  }
  __device__ __forceinline__ void copy(const Cell& cell, uint32_t stage) const {
    const int row0 = cell.row * G::kStride - p.padding[0], column0 = cell.column * G::kStride - p.padding[1];
    const int64_t first = cell.n * plan.image + row0 * plan.row + column0 * plan.column;  // in units of eight channels
    const T* x = static_cast<const T*>(p.x.data) + column * G::kChannels + first * 8;
#pragma unroll
    for (int piece = 0; piece < G::kPieces; ++piece) {
      const int own = threadIdx.x + piece * kGroupThreads, down = own / G::kRowThreads;
      const int across = own % G::kRowThreads / G::kPixelWords, word = own % G::kPixelWords;
      if (own >= G::kRows * G::kRowThreads) break;
      const bool in = (cell.n >= 0) & (static_cast<unsigned>(column0 + across) < static_cast<unsigned>(p.x.size[3]));
      const T* from = x + (down * plan.row + across * plan.column + word) * 8;
      const uint32_t to = stage + G::at(down, across, word);
#pragma unroll
      for (int i = 0; i < G::kPasses; ++i) {
        if ((i + 1) * G::kRows > G::kSide && down + i * G::kRows >= G::kSide) break;
        const bool reads =
            in & (static_cast<unsigned>(row0 + down + i * G::kRows) < static_cast<unsigned>(p.x.size[2]));
        cp_async_16_or_zeros(to + i * (G::kRows * G::kSide * G::kPixelBytes), from, reads);
        from += G::kRows * 8 * plan.row;
      }
    }
  }

  __device__ __forceinline__ void finish(float (&sums)[G::kFragments][G::kTiles * 4], const Cell& cell) const {
    const int col = cell.column + lane / 4;
    const bool in_column = (cell.n >= 0) & (col < p.y.size[3]);
    if constexpr (G::kMerged) {
      // Two groups meet the inputs of each other, times zero, which is not zero for an infinity or NaN.
      float zero = 0.f;
#pragma unroll
      for (int f = 0; f < G::kFragments; ++f)
#pragma unroll
        for (int e = 0; e < G::kTiles * 4; ++e) zero = fmaf(sums[f][e], 0.f, zero);
      if (zero != 0.f && in_column) {
#pragma unroll
        for (int f = 0; f < G::kFragments; ++f)
#pragma unroll
          for (int e = 0; e < G::kTiles * 4; ++e)
            if (!is_finite(sums[f][e]))
              sums[f][e] =
                  own_sum<T>(p, cell.n, (cell.row + f * 2 + e / 2 % 2) * G::kStride - p.padding[0],
                             col * G::kStride - p.padding[1], first_channel + e / 4 * 8 + lane % 4 * 2 + e % 2);
      }
    }
    const int rows = in_column ? static_cast<int>(p.y.size[2]) - cell.row : 0;
    const int own = first_channel + lane % 4 * 2;
    const bool after = adds_after(p);
    const auto add_residual = [&] {
      const T* residual =
          static_cast<const T*>(p.residual.data) + pixel_offset(p.residual, {cell.n, cell.row, col}) + own;
      Pack<T, 2> pairs[kCell][G::kTiles];
#pragma unroll
      for (int row = 0; row < kCell; ++row) {
#pragma unroll
        for (int tile = 0; tile < G::kTiles; ++tile) {
          pairs[row][tile] = {};
          if (row < rows) pairs[row][tile] = *reinterpret_cast<const Pack<T, 2>*>(residual + tile * 8);
        }
        residual += p.residual.stride[2];
      }
#pragma unroll
      for (int row = 0; row < kCell; ++row)
#pragma unroll
        for (int tile = 0; tile < G::kTiles; ++tile)
#pragma unroll
          for (int e = 0; e < 2; ++e) sums[row / 2][tile * 4 + row % 2 * 2 + e] += to_float(pairs[row][tile].v[e]);
    };
#pragma unroll
    for (int tile = 0; tile < G::kTiles; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int f = 0; f < G::kFragments; ++f)
#pragma unroll
          for (int h = 0; h < 2; ++h) sums[f][tile * 4 + h * 2 + e] += bias[tile][e];
      }
    if (p.residual.data && !after) add_residual();
    if (!p.slope) {
      activate<true>(p.activation, p.activation_param, sums);
    } else {
#pragma unroll
      for (int tile = 0; tile < G::kTiles; ++tile)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float slope = number_at<T>(p.slope, p.slope_dtype, first_channel + tile * 8 + lane % 4 * 2 + e);
#pragma unroll
          for (int f = 0; f < G::kFragments; ++f)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& v = sums[f][tile * 4 + h * 2 + e];
              v = v > 0.f ? v : v * slope;
            }
        }
    }
    if (after) add_residual();
    T* y = static_cast<T*>(p.y.data) + pixel_offset(p.y, {cell.n, cell.row, col}) + own;
#pragma unroll
    for (int row = 0; row < kCell; ++row) {
#pragma unroll
      for (int tile = 0; tile < G::kTiles; ++tile) {
        const float* v = &sums[row / 2][tile * 4 + row % 2 * 2];
        if (row < rows) *reinterpret_cast<uint32_t*>(y + tile * 8) = pair_of<T>(v[0], v[1]);
      }
      y += p.y.stride[2];
    }
  }

  // Of cells first, first + step, ...
  __device__ __forceinline__ void run(int first, int step) {
    if (first >= cells) return;
    Cell next = locate(first);
    copy(next, stages);
    cp_async_commit();
    uint32_t stage = 0;  // from the first on
#pragma unroll 1
    for (int number = first; number < cells; number += step) {
      const Cell cell = next;
      if (number + step < cells) {
        next = locate(number + step);
        copy(next, stages + (stage ^ G::kStage));
      }
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();
      float sums[G::kFragments][G::kTiles * 4];
#pragma unroll
      for (int f = 0; f < G::kFragments; ++f)
#pragma unroll
        for (int e = 0; e < G::kTiles * 4; ++e) sums[f][e] = 0.f;
#pragma unroll
      for (int k = 0; k < G::kSteps; ++k) {
        const bool zeros = G::kUnits % 2 && k == G::kSteps - 1 && lane >= 16;  // the last step's second half is none
        const uint32_t base = stages + (zeros ? 0 : stage) + from[k];
#pragma unroll
        for (int f = 0; f < G::kFragments; ++f) {
          uint32_t a[4];
          load_matrix_x4(base + (zeros ? 0 : f * 2 * G::kStride * G::kSide * G::kPixelBytes), a);
#pragma unroll
          for (int tile = 0; tile < G::kTiles; ++tile)
            mma_16x8<T>(reinterpret_cast<float (&)[4]>(sums[f][tile * 4]), a, weights[k][tile][0], weights[k][tile][1]);
        }
      }
      finish(sums, cell);
      __syncthreads();  // all are done with the stage
      stage ^= G::kStage;
    }
    cp_async_wait<0>();
  }
};

template <class T, class G>
__global__ void __launch_bounds__(kGroupThreads, G::kCtas)
    conv_groups_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ PatchPlan plan,
                       const __grid_constant__ FastDiv columns) {
  extern __shared__ __align__(128) char smem[];
  grid_dependency_wait();
  grid_dependency_release();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kGroupThreads + threadIdx.x,
                  int64_t{gridDim.x} * kGroupThreads);
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int cells = count * static_cast<int>(plan.cells_per_block.divisor);
  uint32_t first, column;
  columns.divmod(blockIdx.x, &first, &column);
  const int step = static_cast<int>(gridDim.x / columns.divisor);
  if (static_cast<int>(first) >= cells) return;  // the weights of no cell
  GroupUnits<T, G>(p, plan, smem, static_cast<int>(column), cells).run(static_cast<int>(first), step);
}

template <class T, class G>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  const PatchPlan plan(p, kCell);
  const int64_t columns = p.weight.size[0] / G::kChannels;
  constexpr auto kernel = conv_groups_kernel<T, G>;
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kGroupThreads, G::kBytes, &cache, &ctas));
  const int64_t cells = p.active.capacity * plan.cells_per_block.divisor;
  const int64_t wanted = persistent_grid(device, ctas, cells * columns, plan.fringe.threads(p), kGroupThreads);
  const unsigned grid = static_cast<unsigned>(std::max<int64_t>(wanted / columns, 1) * columns);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kGroupThreads), G::kBytes, stream, p, plan,
                                           FastDiv(columns)));
  return ok_status();
}

template <class T, int kStride>
Status launch_width(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr bool kOne = kStride == 1;
  switch (p.weight.size[1]) {
    case 4:
      return launch<T, GroupShape<1, 1, true, kStride, kOne ? 6 : 4>>(p, device, stream);
    case 8:
      return launch<T, GroupShape<1, 1, false, kStride, kOne ? 6 : 5>>(p, device, stream);
    case 16:
      return launch<T, GroupShape<2, 2, false, kStride, kOne ? 3 : 2>>(p, device, stream);
    default:
      return launch<T, GroupShape<4, 2, false, kStride, 2>>(p, device, stream);
  }
}
template <class T>
Status launch_stride(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.stride[0] == 1 ? launch_width<T, 1>(p, device, stream) : launch_width<T, 2>(p, device, stream);
}

}  // namespace

Status launch_groups_3x3(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.x.dtype == DType::kBF16 ? launch_stride<__nv_bfloat16>(p, device, stream)
                                   : launch_stride<__half>(p, device, stream);
}

}  // namespace sbnet::portable
