// Pools of 2x2 with stride 2, of 3x3 with stride 1 or 2 and of 5x5 with stride 1, channels in 16-byte words: what
// networks use.
//
// Bound by memory, so a tile's input is always on its way: the outputs of a block are cut into tiles of some rows,
// columns and words of channels, and while a team of threads pools one tile from shared memory, asynchronous copies
// bring the next one's input into the other stage. Copies under way need no registers, and a pixel is read once for all
// of its windows. Taps outside of the plane are filled with the border's value: the arithmetic has no cases.
#include <algorithm>

#include "core/settled.h"
#include "cuda/by_dtype.cuh"
#include "cuda/masked/pool.cuh"
#include "cuda/mma.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256;
// Of a stage at most, and CTAs on an SM as far as registers go. Windows that do not overlap have no halo to save.
constexpr int stage_bytes(int kernel) { return (kernel == 2 ? 24 : 42) * 1024; }
constexpr int ctas_per_sm(int kernel, int stride) { return kernel == 2 ? 4 : stride == 2 ? 3 : 2; }
// A list that may have fewer tiles than this for an SM is cut finer: there the time is that of a tile.
constexpr int kTilesPerSm = 16, kSmallStageBytes = 12 * 1024;
constexpr int kTeamWords = 10;         // of a patch, that a thread brings
constexpr int kMostBytes = 84 * 1024;  // of a CTA: two stages, or those of its teams
constexpr int kCacheLine = 8;          // words of channels that a tile is not cut below
constexpr int kLeastOutputs = 8;       // words of outputs of a block: fewer would leave most threads without one

// Outputs, one below the other, that a thread computes from the rows it walks down: where windows share two of them.
SBNET_HOST_DEVICE constexpr int outputs_down(int stride) { return stride == 1 ? 4 : 1; }

// How every block is cut.
struct TilePlan {
  int rows, columns, words;                  // of a tile
  int pixel_words;                           // words of all channels
  int patch_words;                           // of a stage
  int log2_team = 5;                         // threads that share a tile: from a warp for a small one to the CTA
  int segments;                              // items of a tile: a thread's outputs in one column and word
  uint32_t row_bytes = 0, column_bytes = 0;  // steps in x; 0 in a plane of one
  FastDiv block_tiles, chunks, across;       // a tile's index -> slot, row, column, chunk of words
  FastDiv word, column, patch_column;        // an item's or patch word's index -> row, column, word
  FringePlan fringe;
  bool settled = inputs_settled();  // the list may be read before the launch ahead has ended

  TilePlan(const PoolParams& p, const DeviceInfo& device) : fringe(p) {
    // A block larger than the plane is the only one of its direction: no more tiles than the plane has.
    const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
    const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
    const int bytes = static_cast<int>(dtype_size(p.x.dtype)), down = outputs_down(p.stride[0]);
    pixel_words = static_cast<int>(p.y.size[1] * bytes / 16);
    const auto pieces = [](int64_t whole, int64_t piece) { return (whole + piece - 1) / piece; };
    int64_t r = height, c = width, w = pixel_words, patch_rows, patch_columns, tiles;
    bool few;
    for (;;) {
      patch_rows = (pieces(r, down) * down - 1) * p.stride[0] + p.kernel[0];
      patch_columns = (c - 1) * p.stride[1] + p.kernel[1];
      tiles = pieces(height, r) * pieces(width, c) * pieces(pixel_words, w);
      const int64_t stage = patch_rows * patch_columns * w * 16;
      few = tiles * p.active.capacity < kTilesPerSm * device.sm_count;
      if (stage <= (few ? kSmallStageBytes : stage_bytes(p.kernel[0]))) break;
      int64_t& longest = w > kCacheLine ? w : r >= c ? r : c;
      longest = (longest + 1) / 2;
    }
    rows = static_cast<int>(r), columns = static_cast<int>(c), words = static_cast<int>(w);
    patch_words = static_cast<int>(patch_rows * patch_columns * w);
    while ((1 << log2_team) < kThreads && (few || patch_words > kTeamWords << log2_team)) ++log2_team;
    segments = static_cast<int>(pieces(r, down) * c * w);
    chunks = FastDiv(pieces(pixel_words, w));
    across = FastDiv(pieces(width, c));
    block_tiles = FastDiv(tiles);
    word = FastDiv(w), column = FastDiv(c), patch_column = FastDiv(patch_columns);
    if (p.x.size[2] > 1) row_bytes = static_cast<uint32_t>(p.x.stride[2] * bytes);
    if (p.x.size[3] > 1) column_bytes = static_cast<uint32_t>(p.x.stride[3] * bytes);
  }
};

// A tile of y, clipped to its block and the plane; no rows where there is none.
struct Tile {
  int n, row, column, word;
  int rows, columns, words;
};
__device__ __forceinline__ Tile locate(const PoolParams& p, const TilePlan& plan, uint32_t index, const BlockIndex& b) {
  const BlockGrid& grid = p.active.grid;
  if (!is_block(b, static_cast<int>(p.y.size[0]), grid)) return {};
  uint32_t slot, row, column, chunk;
  plan.block_tiles.divmod(index, &slot, &row);
  plan.chunks.divmod(row, &row, &chunk);
  plan.across.divmod(row, &row, &column);
  row *= plan.rows, column *= plan.columns;
  Tile t;
  t.n = b.n;
  t.row = b.i * grid.size[0] + row;
  t.column = b.j * grid.size[1] + column;
  t.word = chunk * plan.words;
  t.rows = min(min(plan.rows, grid.size[0] - static_cast<int>(row)), static_cast<int>(p.y.size[2]) - t.row);
  t.columns = min(min(plan.columns, grid.size[1] - static_cast<int>(column)), static_cast<int>(p.y.size[3]) - t.column);
  t.words = min(plan.words, plan.pixel_words - t.word);
  return t;
}

// Starts to bring the input of tile t into a stage: [patch row][patch column][word].
template <class T, class Pool, int kSize, int kStride>
__device__ __forceinline__ void fetch(const PoolParams& p, const TilePlan& plan, const Tile& t, int thread,
                                      uint4* stage) {
  if (t.rows <= 0 || t.columns <= 0) return;
  const auto border = fill_word<T, kLanes<T>>(Pool::border());
  const int first_row = t.row * kStride - p.padding[0], first_column = t.column * kStride - p.padding[1];
  const uint32_t top = max(-first_row, 0), left = max(-first_column, 0);  // the first inside of the plane
  const int bottom = min((t.rows - 1) * kStride + kSize, static_cast<int>(p.x.size[2]) - first_row);
  const int right = min((t.columns - 1) * kStride + kSize, static_cast<int>(p.x.size[3]) - first_column);
  const uint32_t rows = max(bottom - static_cast<int>(top), 0), columns = max(right - static_cast<int>(left), 0);
  const uint32_t words = t.words;
  const char* x = static_cast<const char*>(p.x.data) + t.n * p.x.stride[0] * static_cast<int64_t>(sizeof(T)) +
                  first_row * int64_t{plan.row_bytes} + first_column * int64_t{plan.column_bytes} +
                  int64_t{t.word} * 16;
#pragma unroll 4
  for (int i = thread; i < plan.patch_words; i += 1 << plan.log2_team) {
    uint32_t pixel, word, row, column;
    plan.word.divmod(i, &pixel, &word);
    plan.patch_column.divmod(pixel, &row, &column);
    if ((row - top < rows) & (column - left < columns) & (word < words))
      cp_async_16(shared_address(stage + i),
                  x + uint64_t{row} * plan.row_bytes + uint64_t{column} * plan.column_bytes + word * 16, true);
    else
      reinterpret_cast<Word<T, kLanes<T>>*>(stage)[i] = border;
  }
}

template <class T, class Pool, int kSize, int kStride>
__device__ __forceinline__ void pool_tile(const PoolParams& p, const TilePlan& plan, const Tile& t, int thread,
                                          const uint4* stage) {
  using Channels = Word<T, kLanes<T>>;
  constexpr int kDown = outputs_down(kStride);
  const int columns = plan.patch_column.divisor, words = plan.word.divisor;
  T* y = static_cast<T*>(p.y.data) + t.n * p.y.stride[0] + int64_t{t.word} * kLanes<T>;
  for (int i = thread; i < plan.segments; i += 1 << plan.log2_team) {
    uint32_t segment, column, word;
    plan.word.divmod(i, &column, &word);
    plan.column.divmod(column, &segment, &column);
    const int first = segment * kDown, rows = t.rows - first;
    if (rows <= 0 || static_cast<int>(column) >= t.columns || static_cast<int>(word) >= t.words) continue;
    const uint4* from = stage + (first * kStride * columns + column * kStride) * words + word;
    const auto load = [](const uint4* at) {  // by value: a reference would be read byte by byte
      const uint4 bits = *at;
      Channels channels;
      memcpy(&channels, &bits, sizeof(bits));
      return channels;
    };
    const int y_row = t.row + first, y_column = t.column + column;
    T* to = y + y_row * p.y.stride[2] + y_column * p.y.stride[3] + word * kLanes<T>;
    const float across_extent = pool_extent(p, 1, y_column * kStride - p.padding[1]);
    Pool outputs[kDown];
#pragma unroll
    for (int r = 0; r < (kDown - 1) * kStride + kSize; ++r) {
      Pool across(load(from));
#pragma unroll
      for (int s = 1; s < kSize; ++s) across.add(load(from + s * words));
      from += columns * words;
#pragma unroll
      for (int o = 0; o < kDown; ++o) {
        if (r == o * kStride) outputs[o] = across;
        if (r > o * kStride && r < o * kStride + kSize) outputs[o].merge(across);
        if (r == o * kStride + kSize - 1 && o < rows) {
          const float divisor = p.divisor_override
                                    ? static_cast<float>(p.divisor_override)
                                    : pool_extent(p, 0, (y_row + o) * kStride - p.padding[0]) * across_extent;
          *reinterpret_cast<Channels*>(to + o * p.y.stride[2]) = outputs[o].finish(divisor);
        }
      }
    }
  }
}

template <class T, class Pool, int kSize, int kStride>
__global__ void __launch_bounds__(kThreads, ctas_per_sm(kSize, kStride))
    pool_tiles_kernel(const __grid_constant__ PoolParams p, const __grid_constant__ TilePlan plan) {
  extern __shared__ uint4 stages[];
  if (!plan.settled) grid_dependency_wait();
  const uint32_t tiles = clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * plan.block_tiles.divisor;
  // Rows of the list are loaded a tile ahead of their use.
  const auto block_of = [&](uint32_t tile) {
    if (tile >= tiles) return BlockIndex{-1, -1, -1};
    const int32_t* row = p.active.indices + int64_t{plan.block_tiles.quotient(tile)} * 3;
    return BlockIndex{row[0], row[1], row[2]};
  };
  const int team = threadIdx.x >> plan.log2_team, thread = threadIdx.x & ((1 << plan.log2_team) - 1);
  const auto team_sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(1 << plan.log2_team) : "memory"); };
  uint4 *reading = stages + 2 * team * plan.patch_words, *writing = reading + plan.patch_words;

  const uint32_t step = gridDim.x * (kThreads >> plan.log2_team);
  uint32_t tile = team * gridDim.x + blockIdx.x;
  Tile here = locate(p, plan, tile, block_of(tile));
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();
  fetch<T, Pool, kSize, kStride>(p, plan, here, thread, reading);
  cp_async_commit();
  BlockIndex ahead = block_of(tile + step);
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
  for (; tile < tiles; tile += step) {
    const Tile next = locate(p, plan, tile + step, ahead);
    ahead = block_of(tile + 2 * step);
    fetch<T, Pool, kSize, kStride>(p, plan, next, thread, writing);
    cp_async_commit();
    cp_async_wait<1>();
    team_sync();
    pool_tile<T, Pool, kSize, kStride>(p, plan, here, thread, reading);
    team_sync();
    here = next;
    uint4* const other = reading;
    reading = writing, writing = other;
  }
}

template <class T, class Pool, int kSize, int kStride>
Status launch(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = pool_tiles_kernel<T, Pool, kSize, kStride>;
  const char* op = pool_name(p.kind);
  const TilePlan plan(p, device);
  SBNET_TRY(allow_shared<kernel>(op, device, kMostBytes));
  const int teams = kThreads >> plan.log2_team, bytes = teams * 2 * plan.patch_words * 16;
  int shared = 0;  // of an SM, of which each CTA takes another KB
  SBNET_CUDA_TRY(op, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.index));
  const int64_t ctas = std::clamp(shared / (bytes + 1024), 1, ctas_per_sm(kSize, kStride)) * int64_t{device.sm_count};
  const int64_t fringe = (plan.fringe.threads(p) + kThreads - 1) / kThreads;
  const int64_t wanted = std::max((p.active.capacity * plan.block_tiles.divisor + teams - 1) / teams, fringe);
  SBNET_CUDA_TRY(op, launch_dependent(device, kernel, dim3(static_cast<unsigned>(std::min(wanted, ctas))),
                                      dim3(kThreads), bytes, stream, p, plan));
  return ok_status();
}

bool window_is(const PoolParams& p, int size, int stride) {
  for (int d = 0; d < 2; ++d)
    if (p.kernel[d] != size || p.stride[d] != stride || p.dilation[d] != 1) return false;
  return true;
}

template <class T>
Status launch_type(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  using Max = Maximum<T, kLanes<T>>;
  using Mean = Average<T, kLanes<T>>;
  const bool max = p.kind == PoolKind::kMax;
  if (window_is(p, 2, 2))
    return max ? launch<T, Max, 2, 2>(p, device, stream) : launch<T, Mean, 2, 2>(p, device, stream);
  if (window_is(p, 5, 1))
    return max ? launch<T, Max, 5, 1>(p, device, stream) : launch<T, Mean, 5, 1>(p, device, stream);
  if (window_is(p, 3, 1))
    return max ? launch<T, Max, 3, 1>(p, device, stream) : launch<T, Mean, 3, 1>(p, device, stream);
  return max ? launch<T, Max, 3, 2>(p, device, stream) : launch<T, Mean, 3, 2>(p, device, stream);
}

}  // namespace

bool pool_tiles_takes(const PoolParams& p) {
  const int64_t bytes = dtype_size(p.x.dtype), lanes = 16 / bytes;
  if (!window_is(p, 2, 2) && !window_is(p, 3, 1) && !window_is(p, 3, 2) && !window_is(p, 5, 1)) return false;
  if (!channels_vectorize(p.x) || !channels_vectorize(p.y) || p.y.size[1] % lanes) return false;
  for (int d : {2, 3})
    if (p.x.size[d] > 1 && p.x.stride[d] > INT32_MAX / bytes) return false;
  const double block = static_cast<double>(std::min<int64_t>(p.active.grid.size[0], p.y.size[2])) *
                       std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) * (p.y.size[1] / lanes);
  return block >= kLeastOutputs && block * p.active.capacity < (1 << 30);  // tiles are counted in 32 bits
}

Status launch_pool_tiles(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype(p.x.dtype, [&](auto t) { return launch_type<decltype(t)>(p, device, stream); });
}

}  // namespace sbnet
