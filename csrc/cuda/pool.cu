// Max and average pooling on active blocks. Bound by memory.
//
// A thread computes a tile of neighbouring outputs for one word of channels. With a known size and stride it walks down
// the tile's input rows without a loop: a row is pooled across, then merged into every row of outputs that sees it. It
// writes when all is done, since no load may move above a store: so nearly all loads of the tile are under way at once.
// What tiles share comes from the L1 cache: those of a block are neighbours in the launch, channels side by side.
#include <algorithm>
#include <cstring>

#include "core/pool.h"
#include "cuda/layer.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256;

// kN channels of a pixel.
template <class T, int kN>
struct alignas(sizeof(T) * kN) Word {
  T channel[kN];
};
template <class T, int kN>
__device__ __forceinline__ Word<T, kN> fill_word(float v) {
  Word<T, kN> word;
#pragma unroll
  for (int e = 0; e < kN; ++e) word.channel[e] = from_float<T>(v);
  return word;
}

// max that passes NaN on.
__device__ __forceinline__ __half2 max_nan(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 max_nan(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ float max_nan(float a, float b) { return b > a || b != b ? b : a; }

template <class T>
struct PairOf {};
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// What the visited part of a window comes to.
template <class T, int kN>
struct Maximum {
  Word<T, kN> best;
  static __device__ __forceinline__ float border() { return -INFINITY; }
  __device__ __forceinline__ Maximum() : best(fill_word<T, kN>(border())) {}
  __device__ __forceinline__ explicit Maximum(const Word<T, kN>& word) : best(word) {}
  __device__ __forceinline__ void add(const Word<T, kN>& word) {
    if constexpr (sizeof(T) == 2 && kN % 2 == 0) {
      using Pair = typename PairOf<T>::Type;
#pragma unroll
      for (int e = 0; e < kN; e += 2) {
        Pair mine, theirs;
        memcpy(&mine, best.channel + e, sizeof(Pair));
        memcpy(&theirs, word.channel + e, sizeof(Pair));
        mine = max_nan(mine, theirs);
        memcpy(best.channel + e, &mine, sizeof(Pair));
      }
    } else {
#pragma unroll
      for (int e = 0; e < kN; ++e)
        best.channel[e] = from_float<T>(max_nan(to_float(best.channel[e]), to_float(word.channel[e])));
    }
  }
  __device__ __forceinline__ void merge(const Maximum& other) { add(other.best); }
  __device__ __forceinline__ Word<T, kN> finish(float) const { return best; }
};
template <class T, int kN>
struct Average {
  float sum[kN];
  static __device__ __forceinline__ float border() { return 0.f; }
  __device__ __forceinline__ Average() : sum{} {}
  __device__ __forceinline__ explicit Average(const Word<T, kN>& word) {
#pragma unroll
    for (int e = 0; e < kN; ++e) sum[e] = to_float(word.channel[e]);
  }
  __device__ __forceinline__ void add(const Word<T, kN>& word) { merge(Average(word)); }
  __device__ __forceinline__ void merge(const Average& other) {
#pragma unroll
    for (int e = 0; e < kN; ++e) sum[e] += other.sum[e];
  }
  __device__ __forceinline__ Word<T, kN> finish(float divisor) const {
    const float factor = __fdividef(1.f, divisor);
    Word<T, kN> word;
#pragma unroll
    for (int e = 0; e < kN; ++e)  // a product's last bit is far below that of a half
      word.channel[e] = from_float<T>(sizeof(T) == 2 ? sum[e] * factor : sum[e] / divisor);
    return word;
  }
};

struct PoolPlan {
  int64_t block_items;  // tiles x words of a block
  FastDiv block, inner, tiles_per_row;
  bool channels_inner;  // neighbouring threads take the words of a tile, else the tiles of a word
  bool wide;            // too many items for 32 bits
  FringePlan fringe;
};

// The first tap of an axis inside the plane, and how many there are.
__device__ __forceinline__ void clip_taps(const PoolParams& p, int d, int begin, int* first, int* taps) {
  const int step = p.dilation[d], side = static_cast<int>(p.x.size[2 + d]);
  const int skipped = begin < 0 ? (step - 1 - begin) / step : 0;
  *first = begin + skipped * step;
  const int inside = *first < side ? (side - *first + step - 1) / step : 0;
  *taps = min(p.kernel[d] - skipped, inside);
}

// kSize 0: a kernel of any size, stride and dilation; one output a thread.
template <int kSize, int kStride>
struct Tile {
  static constexpr int kRows = kSize == 0 ? 1 : 2;
  static constexpr int kColumns = kSize == 0 ? 1 : 2;
  static constexpr int kCtas = kSize == 3 && kStride == 1 ? 3 : 2;  // per SM: so many registers
};

template <class T, int kN, class Pool, int kSize, int kStride>
__global__ void __launch_bounds__(kThreads, Tile<kSize, kStride>::kCtas)
    pool_kernel(const __grid_constant__ PoolParams p, const __grid_constant__ PoolPlan plan) {
  constexpr int kRows = Tile<kSize, kStride>::kRows, kColumns = Tile<kSize, kStride>::kColumns;
  using Channels = Word<T, kN>;
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  clear_fringe<T>(p, plan.fringe, thread, threads);

  const BlockGrid& grid = p.active.grid;
  const int H = static_cast<int>(p.x.size[2]), W = static_cast<int>(p.x.size[3]);
  const int64_t items = clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * plan.block_items;
  for (int64_t item = thread; item < items; item += threads) {
    uint32_t slot, rest, tile, word, tile_row, tile_column;
    if (plan.wide) {
      slot = static_cast<uint32_t>(item / plan.block_items);
      rest = static_cast<uint32_t>(item - slot * plan.block_items);
    } else {
      plan.block.divmod(static_cast<uint32_t>(item), &slot, &rest);
    }
    plan.inner.divmod(rest, &tile, &word);
    if (!plan.channels_inner) {
      const uint32_t t = tile;
      tile = word, word = t;
    }
    plan.tiles_per_row.divmod(tile, &tile_row, &tile_column);
    BlockIndex b;
    if (!load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b)) continue;
    const int in_block[2] = {static_cast<int>(tile_row) * kRows, static_cast<int>(tile_column) * kColumns};
    const int row = b.i * grid.size[0] + in_block[0], column = b.j * grid.size[1] + in_block[1];
    const int rows = min(min(kRows, grid.size[0] - in_block[0]), static_cast<int>(p.y.size[2]) - row);
    const int columns = min(min(kColumns, grid.size[1] - in_block[1]), static_cast<int>(p.y.size[3]) - column);
    if (rows <= 0 || columns <= 0) continue;

    const int first_row = row * p.stride[0] - p.padding[0], first_column = column * p.stride[1] - p.padding[1];
    const int64_t channel = int64_t{word} * kN;
    const T* x = static_cast<const T*>(p.x.data) + b.n * p.x.stride[0] + channel * p.x.stride[1];
    T* y = static_cast<T*>(p.y.data) + b.n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3] +
           channel * p.y.stride[1];
    float down_extent[kRows], across_extent[kColumns];
#pragma unroll
    for (int i = 0; i < kRows; ++i) down_extent[i] = pool_extent(p, 0, first_row + i * p.stride[0]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) across_extent[c] = pool_extent(p, 1, first_column + c * p.stride[1]);
    const auto write = [&](const Pool& output, int i, int c) {
      if (i < rows && c < columns)
        *reinterpret_cast<Channels*>(y + i * p.y.stride[2] + c * p.y.stride[3]) = output.finish(
            p.divisor_override ? static_cast<float>(p.divisor_override) : down_extent[i] * across_extent[c]);
    };
    if constexpr (kSize > 0) {
      constexpr int kAcross = (kColumns - 1) * kStride + kSize;
      Pool outputs[kRows][kColumns];
      x += first_row * p.x.stride[2] + first_column * p.x.stride[3];
#pragma unroll
      for (int r = 0; r < (kRows - 1) * kStride + kSize; ++r) {
        const bool row_in = static_cast<unsigned>(first_row + r) < static_cast<unsigned>(H);
        Channels words[kAcross];
#pragma unroll
        for (int j = 0; j < kAcross; ++j) {
          words[j] = fill_word<T, kN>(Pool::border());
          if (row_in & (static_cast<unsigned>(first_column + j) < static_cast<unsigned>(W)))
            words[j] = *reinterpret_cast<const Channels*>(x + r * p.x.stride[2] + j * p.x.stride[3]);
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          Pool across(words[c * kStride]);
#pragma unroll
          for (int s = 1; s < kSize; ++s) across.add(words[c * kStride + s]);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (r == i * kStride) outputs[i][c] = across;
            if (r > i * kStride && r < i * kStride + kSize) outputs[i][c].merge(across);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) write(outputs[i][c], i, c);
    } else {
      int top, left, down, taps;
      clip_taps(p, 0, first_row, &top, &down);
      clip_taps(p, 1, first_column, &left, &taps);
      x += top * p.x.stride[2] + left * p.x.stride[3];
      Pool output;
      for (int r = 0; r < down; ++r) {
        const T* at = x + int64_t{r} * p.dilation[0] * p.x.stride[2];
        Pool across;  // sums in the order of the kernels above: the same bits for every layout
#pragma unroll 4
        for (int s = 0; s < taps; ++s)
          across.add(*reinterpret_cast<const Channels*>(at + int64_t{s} * p.dilation[1] * p.x.stride[3]));
        output.merge(across);
      }
      write(output, 0, 0);
    }
  }
}

template <class T, int kN, class Pool, int kSize, int kStride>
Status launch(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kRows = Tile<kSize, kStride>::kRows, kColumns = Tile<kSize, kStride>::kColumns;
  constexpr auto kernel = pool_kernel<T, kN, Pool, kSize, kStride>;
  // A block larger than the plane is the only one of its direction: no more tiles than the plane has.
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
  const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  const int64_t words = p.y.size[1] / kN, tiles_per_row = (width + kColumns - 1) / kColumns;
  const double block = static_cast<double>((height + kRows - 1) / kRows) * tiles_per_row * words;
  SBNET_CHECK(block <= INT32_MAX / 2, "%s: active: blocks of %.0f words of channels; at most 2^30 are wanted",
              pool_name(p.kind), block);

  PoolPlan plan;
  plan.block_items = static_cast<int64_t>(block);
  plan.channels_inner = p.y.stride[1] <= p.y.stride[3];
  plan.block = FastDiv(plan.block_items);
  plan.inner = FastDiv(plan.channels_inner ? words : plan.block_items / words);
  plan.tiles_per_row = FastDiv(tiles_per_row);
  const int64_t most = p.active.capacity * plan.block_items;
  plan.wide = most > INT32_MAX;
  plan.fringe = FringePlan(p);

  static std::atomic<int> ctas_per_sm[kMaxDevices];
  int ctas = device.index < kMaxDevices ? ctas_per_sm[device.index].load(std::memory_order_relaxed) : 0;
  if (!ctas) {
    SBNET_CUDA_TRY(pool_name(p.kind), cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, 0));
    if (device.index < kMaxDevices) ctas_per_sm[device.index].store(ctas, std::memory_order_relaxed);
  }
  const int64_t wanted = (std::max(most, plan.fringe.threads(p)) + kThreads - 1) / kThreads;
  const dim3 ctas_used(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{ctas} * device.sm_count)));
  SBNET_CUDA_TRY(pool_name(p.kind), launch_dependent(device, kernel, ctas_used, dim3(kThreads), 0, stream, p, plan));
  return ok_status();
}

template <class T, template <class, int> class Pool>
Status launch_pool(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kN = kLanes<T>;
  const bool words = channels_vectorize(p.x) && channels_vectorize(p.y) && p.x.size[1] % kN == 0;
  if (!words) return launch<T, 1, Pool<T, 1>, 0, 0>(p, device, stream);
  const auto is = [&](int size, int stride) {
    for (int d = 0; d < 2; ++d)
      if (p.kernel[d] != size || p.stride[d] != stride || p.dilation[d] != 1) return false;
    return true;
  };
  if (is(2, 2)) return launch<T, kN, Pool<T, kN>, 2, 2>(p, device, stream);
  if (is(3, 1)) return launch<T, kN, Pool<T, kN>, 3, 1>(p, device, stream);
  if (is(3, 2)) return launch<T, kN, Pool<T, kN>, 3, 2>(p, device, stream);
  return launch<T, kN, Pool<T, kN>, 0, 0>(p, device, stream);
}

template <class T>
Status launch_type(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.kind == PoolKind::kMax ? launch_pool<T, Maximum>(p, device, stream)
                                  : launch_pool<T, Average>(p, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pool2d_cuda(const sbnet::PoolParams* params, void* stream_handle) {
  using namespace sbnet;
  const PoolParams& p = *params;
  SBNET_TRY(validate(p));
  const bool fringe = p.fringe.pixels && p.fringe.capacity > 0;
  if (!p.y.size[0] || (!p.active.capacity && !fringe)) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(pool_name(p.kind), &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (p.x.dtype) {
    case DType::kF16:
      return launch_type<__half>(p, device, stream);
    case DType::kBF16:
      return launch_type<__nv_bfloat16>(p, device, stream);
    default:
      return launch_type<float>(p, device, stream);
  }
}
