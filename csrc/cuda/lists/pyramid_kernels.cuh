// The kernels of mask_pyramid, and the tables of planes, fringes and consumers that they read: see pyramid.cu.
#pragma once
#include "core/lists/pyramid.h"
#include "cuda/common.cuh"
#include "cuda/lists/mask.cuh"

namespace sbnet::pyramid {

constexpr unsigned kAll = 0xffffffff;

struct MaskArgs {
  const void* mask;
  const void* const* mask_at;  // where its address stands, or null
  int64_t stride[3];
  double tol;
  DType dtype;
  bool vectors;  // 16-byte loads, where the mask begins at such an address
  bool nonzero;  // of bytes: those that are set are those that are not 0
  int height, width, margin;
  int32_t* flags;  // of the chunks of all lists: 0 until the chunk's entries are counted, then their number and 1
  int flag_count;
};

struct PlaneArgs {
  TiledPlane tiles;
  int words_per_row, words;  // of blocks: of a row of them, of the batch
  int warps, segments;       // that look at the mask for a word, and in how many pieces of its columns
  int flags;                 // the first one of its chunks
  uint32_t* bits;            // [words]
  int32_t *indices, *count, *total, *block_map;
};

struct FringeArgs {
  int plane, first_consumer, consumers;
  int words;  // of pixels, of the batch
  int flags;
  int32_t *pixels, *count;
};
struct Consumer {
  int plane;
  Reader reader;
};

struct Counts {
  int planes, fringes, batch;
};
template <int kPlanes, int kFringes, int kConsumers>
struct NearTables : Counts {
  static constexpr bool kFar = false;
  static constexpr int kMostPlanes = kPlanes, kMostFringes = kFringes, kMostConsumers = kConsumers;
  PlaneArgs plane[kPlanes];
  FringeArgs fringe[kFringes];
  Consumer consumer[kConsumers];
};
using SmallTables = NearTables<12, 20, 20>;
using LargeTables = NearTables<32, 112, 144>;
struct FarTables : Counts {  // in device memory, written by an earlier kernel: to be read after grid_dependency_wait()
  static constexpr bool kFar = true;
  const PlaneArgs* plane;
  const FringeArgs* fringe;
  const Consumer* consumer;
};
static_assert(sizeof(MaskArgs) + sizeof(SmallTables) <= 4096 && sizeof(MaskArgs) + sizeof(LargeTables) <= 32764,
              "a kernel's parameters");
static_assert(sizeof(PlaneArgs) <= kPyramidTableEntry && sizeof(FringeArgs) <= kPyramidTableEntry &&
                  sizeof(Consumer) <= kPyramidTableEntry,
              "the workspace");

// Part of a table, as a launch's parameter.
template <class T>
struct TablePart {
  static constexpr int kRoom = 3840 / sizeof(T);
  T entry[kRoom];
};
template <class T>
__global__ void table_kernel(const __grid_constant__ TablePart<T> part, T* to, int entries) {
  grid_dependency_release();
  grid_dependency_wait();
  for (int k = threadIdx.x; k < entries; k += blockDim.x) to[k] = part.entry[k];
}

// ---- blocks

constexpr int kBlockThreads = 512, kBlockWarps = kBlockThreads / 32;
constexpr int kWarpColumns = 128;  // words of the mask's columns, of a warp
SBNET_HOST_DEVICE inline int block_ctas(const PlaneArgs& p) {
  const int together = kBlockWarps / p.warps;
  return (p.words + together - 1) / together;
}

// A bit for each of sixteen bytes that is not 0.
__device__ __forceinline__ uint32_t nonzero_bytes(const uint4& v) {
  if (!(v.x | v.y | v.z | v.w)) return 0;
  const auto four = [](uint32_t bytes) {
    const uint32_t high = (bytes | ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu)) & 0x80808080u;
    return ((high >> 7) * 0x01020408u) >> 24;
  };
  return four(v.x) | four(v.y) << 4 | four(v.z) << 8 | four(v.w) << 12;
}

// The columns in which a row of the mask is set, from those of word `first` on, go to `columns` as bits. Of the threads
// this is number `thread`.
template <class T, int kVec>
__device__ __forceinline__ void find_columns(const MaskArgs& a, const T* image, Span rows, int first, int words,
                                             uint32_t* columns, int thread, int threads) {
  const int across = words * (32 / kVec), end = (rows.end - rows.begin) * across;
#pragma unroll 4
  for (int k = thread; k < end; k += threads) {
    const int row = k / across, at = (k - row * across) * kVec, x = first * 32 + at;
    if (x >= a.width) continue;
    const T* from = image + (rows.begin + row) * a.stride[1];
    uint32_t bits = 0;
    if (kVec == 16 && a.nonzero) {
      bits = nonzero_bytes(*reinterpret_cast<const uint4*>(from + x));
    } else if constexpr (kVec > 1) {
      const auto found = *reinterpret_cast<const Pack<T, kVec>*>(from + x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) bits |= static_cast<uint32_t>(above(found.v[e], a.tol)) << e;
    } else {
      bits = above(from[x * a.stride[2]], a.tol);
    }
    bits <<= at % 32;
    if (bits & ~*const_cast<volatile uint32_t*>(columns + at / 32)) atomicOr(columns + at / 32, bits);
  }
}

template <class Tables>
__global__ void __launch_bounds__(kBlockThreads)
    block_kernel(const __grid_constant__ MaskArgs a, const __grid_constant__ Tables planes) {
  __shared__ uint32_t all_columns[kBlockWarps * kWarpColumns];
  grid_dependency_release();
  if constexpr (Tables::kFar) grid_dependency_wait();
  int u = blockIdx.x, k = 0;
  while (u >= block_ctas(planes.plane[k])) u -= block_ctas(planes.plane[k++]);
  const PlaneArgs& p = planes.plane[k];
  const int threads = p.warps * 32, group = threadIdx.x / threads, thread = threadIdx.x - group * threads;
  const int word = u * (kBlockWarps / p.warps) + group, row = word / p.words_per_row, n = row / p.tiles.count[0];
  const int j0 = (word - row * p.words_per_row) * 32, j = j0 + static_cast<int>(threadIdx.x % 32);
  const int last = min(j0 + 31, p.tiles.count[1] - 1);
  const Span rows = pyramid_span(p.tiles, 0, row - n * p.tiles.count[0], a.height, a.margin);
  const Span own = pyramid_span(p.tiles, 1, min(j, last), a.width, a.margin);
  const int begin = pyramid_span(p.tiles, 1, j0, a.width, a.margin).begin / 32;  // in words
  const int end = (pyramid_span(p.tiles, 1, last, a.width, a.margin).end + 31) / 32;
  uint32_t* columns = all_columns + group * p.warps * kWarpColumns;
  grid_dependency_wait();
  for (int f = static_cast<int>(blockIdx.x * kBlockThreads + threadIdx.x); f < a.flag_count;
       f += static_cast<int>(gridDim.x) * kBlockThreads)
    a.flags[f] = 0;
  const void* mask = a.mask_at ? *a.mask_at : a.mask;
  const bool vectors = a.vectors && reinterpret_cast<uintptr_t>(mask) % 16 == 0;
  uint32_t set = 0;
  for (int segment = 0; segment < p.segments; ++segment) {
    const int first = begin + segment * p.warps * kWarpColumns, words = min(end - first, p.warps * kWarpColumns);
    for (int f = thread; f < words; f += threads) columns[f] = 0;
    __syncthreads();
    if (word < p.words)
      by_mask_dtype(a.dtype, [&](auto t) {
        using T = decltype(t);
        const T* image = static_cast<const T*>(mask) + n * a.stride[0];
        if (vectors)
          find_columns<T, 16 / sizeof(T)>(a, image, rows, first, words, columns, thread, threads);
        else
          find_columns<T, 1>(a, image, rows, first, words, columns, thread, threads);
      });
    __syncthreads();
    if (thread < 32)
      for (int w = max(own.begin / 32, first); w < min((own.end + 31) / 32, first + words); ++w)
        set |= columns[w - first] & bit_range(own.begin - w * 32, own.end - w * 32);
    __syncthreads();
  }
  if (thread >= 32 || word >= p.words) return;
  const uint32_t found = __ballot_sync(kAll, set && j <= last);
  if (thread == 0) p.bits[word] = found;
}

// ---- lists of blocks

constexpr int kChunkThreads = 512, kChunkWarps = kChunkThreads / 32;
constexpr int kPlaneChunk = kChunkWarps;    // words of blocks that a CTA lists
constexpr int kPixelChunk = kChunkThreads;  // words of pixels
SBNET_HOST_DEVICE inline int chunks_of(const PlaneArgs& p) {
  return greater(1, (p.words + kPlaneChunk - 1) / kPlaneChunk);
}
SBNET_HOST_DEVICE inline int chunks_of(const FringeArgs& f) {
  return greater(1, (f.words + kPixelChunk - 1) / kPixelChunk);
}

// What the chunks of a list before this one hold: each says so as soon as it knows. Chunks are CTAs in order, so that
// those which others wait for started first, and they wait for none behind them. To be called once, by the whole CTA;
// one warp looks, as the others' looks would be in the way of the answer.
__device__ __forceinline__ int listed_before(int32_t* flags, int chunk, int own) {
  __shared__ int before;
  volatile int32_t* flag = flags;
  if (threadIdx.x == 0) flag[chunk] = own + 1;
  if (threadIdx.x < 32) {
    int sum = 0;
    for (int k = threadIdx.x; k < chunk; k += 32) {
      int found = flag[k];
      while (!found) found = flag[k];
      sum += found - 1;
    }
    sum = __reduce_add_sync(kAll, sum);
    if (threadIdx.x == 0) before = sum;
  }
  __syncthreads();
  return before;
}

// -1 to list[begin, end), by a CTA.
__device__ __forceinline__ void fill_rest(int32_t* list, int64_t begin, int64_t end) {
  const int64_t odd = static_cast<int64_t>(-(reinterpret_cast<uintptr_t>(list + begin) / 4) & 3);  // before 16 bytes
  const int64_t words = begin + odd < end ? (end - begin - odd) / 4 : 0;
  int4* to = reinterpret_cast<int4*>(list + begin + odd);
  for (int64_t k = threadIdx.x; k < words; k += kChunkThreads) to[k] = make_int4(-1, -1, -1, -1);
  const int64_t left = end - begin - words * 4;  // less than 8
  if (threadIdx.x < left) list[begin + threadIdx.x + (threadIdx.x < odd ? 0 : words * 4)] = -1;
}

// A chunk of the list of a plane's active blocks. Where its blocks that are not active leave room at the end, it writes
// -1: all chunks together fill the list, and none has to know how long it is.
__device__ __forceinline__ void list_plane(const MaskArgs& a, const PlaneArgs& p, int batch, int chunk) {
  const int rows = p.tiles.count[0], columns = p.tiles.count[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = chunk * kPlaneChunk, count = min(kPlaneChunk, p.words - first);
  const uint32_t word = lane < count ? p.bits[first + lane] : 0;
  const int own = __reduce_add_sync(kAll, __popc(word)),
            above = __reduce_add_sync(kAll, lane < warp ? __popc(word) : 0);
  const int before = listed_before(a.flags + p.flags, chunk, own);
  const auto blocks_to = [&](int at) {  // of the batch, in words before that
    const int row = at / p.words_per_row;
    return static_cast<int64_t>(row) * columns + min((at - row * p.words_per_row) * 32, columns);
  };
  const uint32_t mine = __shfl_sync(kAll, word, warp);
  if (warp < count) {
    const int at = first + warp, row = at / p.words_per_row, j = (at - row * p.words_per_row) * 32 + lane;
    if (j < columns) {
      const int slot = mine >> lane & 1 ? before + above + __popc(mine & ((1u << lane) - 1)) : -1;
      p.block_map[static_cast<int64_t>(row) * columns + j] = slot;
      if (slot >= 0) {
        int32_t* index = p.indices + static_cast<int64_t>(slot) * 3;
        const int n = row / rows;
        index[0] = n, index[1] = row - n * rows, index[2] = j;
      }
    }
  }
  const int64_t capacity = static_cast<int64_t>(batch) * rows * columns, passed = blocks_to(first);
  const int64_t end = capacity - (passed - before), clear = blocks_to(first + max(count, 0)) - passed - own;
  fill_rest(p.indices, (end - clear) * 3, end * 3);
  if (chunk + 1 == chunks_of(p) && threadIdx.x == 0) *p.count = *p.total = before + own;
}

// ---- fringes

// The active blocks of one image.
struct BitLookup {
  const uint32_t* bits;
  int words_per_row;
  __device__ uint32_t operator()(int i, int j, int n) const {
    const uint32_t* word = bits + static_cast<int64_t>(i) * words_per_row + j / 32;
    uint32_t found = word[0] >> (j % 32);
    if (j % 32 + n > 32) found |= word[1] << (32 - j % 32);
    return found & ~0u >> (32 - n);
  }
};

template <class Tables>
__device__ __forceinline__ void list_fringe(const MaskArgs& a, const Tables& tables, const FringeArgs& f, int chunk) {
  __shared__ int sums[kChunkWarps];
  const PlaneArgs& own = tables.plane[f.plane];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int height = own.tiles.size[0], width = own.tiles.size[1], per_row = own.tiles.words();
  const int first = chunk * kPixelChunk, count = max(min(kPixelChunk, f.words - first), 0);
  uint32_t found = 0;
  if (static_cast<int>(threadIdx.x) < count) {
    const int index = first + static_cast<int>(threadIdx.x), row = index / per_row, x0 = (index - row * per_row) * 32;
    const int n = row / height, y = row - n * height;
    const auto active = [&](const PlaneArgs& p) {
      return BitLookup{p.bits + static_cast<int64_t>(n) * p.tiles.count[0] * p.words_per_row, p.words_per_row};
    };
    const uint32_t wanted = unwritten(own.tiles, active(own), y, x0);
    for (int r = 0; r < f.consumers; ++r) {
      const Consumer& consumer = tables.consumer[f.first_consumer + r];
      const PlaneArgs& out = tables.plane[consumer.plane];
      found |= read_by(out.tiles, consumer.reader, active(out), y, x0, wanted & ~found);
    }
  }
  const int mine = __reduce_add_sync(kAll, __popc(found));
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  const int sum = lane < kChunkWarps ? sums[lane] : 0;
  const int all = __reduce_add_sync(kAll, sum), above = __reduce_add_sync(kAll, lane < warp ? sum : 0);
  const int before = listed_before(a.flags + f.flags, chunk, all);
  int slot = before + above;
  for (uint32_t left = __ballot_sync(kAll, found != 0); left; left &= left - 1) {
    const int from = lowest_bit(left), word = first + warp * 32 + from, row = word / per_row;
    const uint32_t bits = __shfl_sync(kAll, found, from);
    if (bits >> lane & 1)
      f.pixels[slot + __popc(bits & ((1u << lane) - 1))] = row * width + (word - row * per_row) * 32 + lane;
    slot += __popc(bits);
  }
  const auto pixels_to = [&](int word) {  // of the batch, in words before that
    const int row = word / per_row;
    return static_cast<int64_t>(row) * width + min((word - row * per_row) * 32, width);
  };
  const int64_t capacity = static_cast<int64_t>(tables.batch) * height * width, passed = pixels_to(first);
  const int64_t rest = capacity - (passed - before), clear = pixels_to(first + count) - passed - all;
  fill_rest(f.pixels, rest - clear, rest);
  if (chunk + 1 == chunks_of(f) && threadIdx.x == 0) *f.count = before + all;
}

template <class Tables>
__global__ void __launch_bounds__(kChunkThreads)
    list_kernel(const __grid_constant__ MaskArgs a, const __grid_constant__ Tables tables) {
  grid_dependency_release();
  if constexpr (Tables::kFar) grid_dependency_wait();
  int u = blockIdx.x, k = 0;
  while (k < tables.planes && u >= chunks_of(tables.plane[k])) u -= chunks_of(tables.plane[k++]);
  const bool blocks = k < tables.planes;
  if (!blocks) {
    k = 0;
    while (u >= chunks_of(tables.fringe[k])) u -= chunks_of(tables.fringe[k++]);
  }
  grid_dependency_wait();
  if (blocks)
    list_plane(a, tables.plane[k], tables.batch, u);
  else
    list_fringe(a, tables, tables.fringe[k], u);
}

}  // namespace sbnet::pyramid
