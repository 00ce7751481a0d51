// The kernels of mask_pyramid, and the tables of planes, fringes and consumers that they read: see pyramid.cu.
#pragma once
#include "core/lists/pyramid.h"
#include "cuda/lists/bitlist.cuh"
#include "cuda/lists/mask.cuh"

namespace sbnet::pyramid {

constexpr unsigned kAll = 0xffffffff;

// The mask, and what is left of it: [batch, strips, words] words of bits.
struct StripArgs {
  const void* mask;
  const void* const* mask_at;  // where its address stands, or null
  int64_t stride[3];
  double tol;
  DType dtype;
  bool vectors;  // 16-byte loads, where the mask begins at such an address
  int height, width, margin;
  int strip, strips, words;  // rows of a strip, strips of an image, words of a strip
  int units;                 // batch * strips * words
  uint32_t* bits;
};

struct PlaneArgs {
  TiledPlane tiles;
  int words_per_row, words;  // of blocks: of a row of them, of the batch
  int threads;               // that search one rectangle: 1, or warps up to a whole CTA
  uint32_t* bits;            // [words]
  int32_t *indices, *count, *total, *block_map;
};

struct FringeArgs {
  int plane, first_consumer, consumers;
  int words;          // of pixels, of the batch
  uint32_t* bits;     // [words]
  int32_t* per_warp;  // [words / 32, rounded up]
};
struct Consumer {
  int plane;
  Reader reader;
};
struct PixelArgs {
  const uint32_t* bits;
  const int32_t* per_warp;
  int words, width, chunks;
  int64_t capacity;
  FastDiv words_per_row;
  int32_t *pixels, *count;
};

struct Counts {
  int planes, fringes, batch, list_ctas;
};
constexpr int kNearPlanes = 12, kNearFringes = 20, kNearConsumers = 20;
struct NearTables : Counts {
  static constexpr bool kFar = false;
  PlaneArgs plane[kNearPlanes];
  FringeArgs fringe[kNearFringes];
  Consumer consumer[kNearConsumers];
};
struct FarTables : Counts {  // in device memory, written by an earlier kernel: to be read after grid_dependency_wait()
  static constexpr bool kFar = true;
  const PlaneArgs* plane;
  const FringeArgs* fringe;
  const Consumer* consumer;
};
struct NearPixels {
  static constexpr bool kFar = false;
  PixelArgs fringe[kNearFringes];
};
struct FarPixels {
  static constexpr bool kFar = true;
  const PixelArgs* fringe;
};
static_assert(sizeof(StripArgs) + sizeof(NearTables) <= 4096 && sizeof(NearPixels) <= 4096, "a kernel's parameters");
static_assert(sizeof(PlaneArgs) <= kPyramidTableEntry && sizeof(FringeArgs) <= kPyramidTableEntry &&
                  sizeof(Consumer) <= kPyramidTableEntry && sizeof(PixelArgs) <= kPyramidTableEntry,
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

// ---- the mask

constexpr int kStripThreads = 256;

template <class T>
__device__ __forceinline__ uint32_t strip_word(const StripArgs& a, const void* mask, int n, int strip, int word) {
  constexpr int kVec = 16 / sizeof(T), kLanes = 32 / kVec;  // values of a load, lanes of a row
  const int lane = threadIdx.x % 32, y_end = min((strip + 1) * a.strip, a.height);
  const T* image = static_cast<const T*>(mask) + n * a.stride[0];
  uint32_t bits = 0;
  if (a.vectors && reinterpret_cast<uintptr_t>(mask) % 16 == 0) {
    const int at = lane % kLanes * kVec, x = word * 32 + at;
    if (x < a.width) {
#pragma unroll 8
      for (int y = strip * a.strip + lane / kLanes; y < y_end; y += 32 / kLanes) {
        const auto p = *reinterpret_cast<const Pack<T, kVec>*>(image + y * a.stride[1] + x);
#pragma unroll
        for (int e = 0; e < kVec; ++e) bits |= static_cast<uint32_t>(above(p.v[e], a.tol)) << e;
      }
    }
    bits <<= at;
  } else if (word * 32 + lane < a.width) {
    const T* column = image + (word * 32 + lane) * a.stride[2];
#pragma unroll 8
    for (int y = strip * a.strip; y < y_end; ++y)
      bits |= static_cast<uint32_t>(above(column[y * a.stride[1]], a.tol)) << lane;
  }
  return __reduce_or_sync(kAll, bits);
}

__global__ void __launch_bounds__(kStripThreads) strip_kernel(const __grid_constant__ StripArgs a) {
  grid_dependency_release();
  const int u = blockIdx.x * (kStripThreads / 32) + threadIdx.x / 32;
  const int row = u / a.words, word = u - row * a.words, n = row / a.strips, strip = row - n * a.strips;
  grid_dependency_wait();
  if (u >= a.units) return;
  const void* mask = a.mask_at ? *a.mask_at : a.mask;
  const uint32_t bits =
      by_mask_dtype(a.dtype, [&](auto t) { return strip_word<decltype(t)>(a, mask, n, strip, word); });
  if (threadIdx.x % 32 == 0) a.bits[u] = bits;
}

// ---- blocks

constexpr int kBlockThreads = 256, kBlockWarps = kBlockThreads / 32;

SBNET_HOST_DEVICE inline int block_ctas(const PlaneArgs& p) {
  return p.threads == 1 ? (p.words + kBlockWarps - 1) / kBlockWarps : p.words;
}

// Is a bit of the rectangle set? Of its words number first, first + step, ... are looked at.
__device__ __forceinline__ bool any_set(const StripArgs& a, int n, Span rows, Span columns, int first, int step) {
  const int top = rows.begin / a.strip, down = (rows.end + a.strip - 1) / a.strip - top;
  const int left = columns.begin / 32, across = (columns.end + 31) / 32 - left;
  const uint32_t* bits = a.bits + (static_cast<int64_t>(n) * a.strips + top) * a.words + left;
  uint32_t found = 0;
#pragma unroll 8
  for (int k = first; k < down * across; k += step) {
    const int row = k / across, word = k - row * across, x = (left + word) * 32;
    found |= bits[static_cast<int64_t>(row) * a.words + word] & bit_range(columns.begin - x, columns.end - x);
  }
  return found;
}

template <class Tables>
__global__ void __launch_bounds__(kBlockThreads)
    block_kernel(const __grid_constant__ StripArgs a, const __grid_constant__ Tables planes) {
  __shared__ uint32_t together;
  grid_dependency_release();
  if constexpr (Tables::kFar) grid_dependency_wait();
  int u = blockIdx.x, k = 0;
  while (u >= block_ctas(planes.plane[k])) u -= block_ctas(planes.plane[k++]);
  const PlaneArgs& p = planes.plane[k];
  const int word = p.threads == 1 ? u * kBlockWarps + threadIdx.x / 32 : u;
  const int row = word / p.words_per_row, j0 = (word - row * p.words_per_row) * 32;
  const int n = row / p.tiles.count[0], i = row - n * p.tiles.count[0];
  const Span rows = pyramid_span(p.tiles, 0, i, a.height, a.margin);
  if (p.threads == 1) {
    const int j = j0 + static_cast<int>(threadIdx.x % 32);
    const Span columns = pyramid_span(p.tiles, 1, j, a.width, a.margin);
    grid_dependency_wait();
    if (word >= p.words) return;
    const uint32_t bits = __ballot_sync(kAll, j < p.tiles.count[1] && any_set(a, n, rows, columns, 0, 1));
    if (threadIdx.x % 32 == 0) p.bits[word] = bits;
    return;
  }
  if (threadIdx.x == 0) together = 0;
  __syncthreads();
  grid_dependency_wait();
  const int thread = threadIdx.x % p.threads;
  for (int j = j0 + threadIdx.x / p.threads; j < min(j0 + 32, p.tiles.count[1]); j += kBlockThreads / p.threads) {
    const bool set = any_set(a, n, rows, pyramid_span(p.tiles, 1, j, a.width, a.margin), thread, p.threads);
    if (__any_sync(kAll, set) && threadIdx.x % 32 == 0) atomicOr(&together, 1u << (j - j0));
  }
  __syncthreads();
  if (threadIdx.x == 0) p.bits[word] = together;
}

// ---- lists of blocks, bits of fringes

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
__device__ __forceinline__ BitLookup lookup(const PlaneArgs& p, int n) {
  return {p.bits + static_cast<int64_t>(n) * p.tiles.count[0] * p.words_per_row, p.words_per_row};
}

__device__ __forceinline__ void list_plane(const PlaneArgs& p, int batch, int chunk, int chunks) {
  const int rows = p.tiles.count[0], columns = p.tiles.count[1];
  const int total = list_bits<1>(p.bits, nullptr, p.words, chunk, [&](int word, int bit, int slot) {
    const int row = word / p.words_per_row, j = (word - row * p.words_per_row) * 32 + bit;
    if (j >= columns) return;
    p.block_map[static_cast<int64_t>(row) * columns + j] = slot;
    if (slot < 0) return;
    int32_t* index = p.indices + static_cast<int64_t>(slot) * 3;
    const int n = row / rows;
    index[0] = n, index[1] = row - n * rows, index[2] = j;
  });
  const int64_t capacity = static_cast<int64_t>(batch) * rows * columns;
  for (int64_t k = total * int64_t{3} + static_cast<int64_t>(chunk) * kListThreads + threadIdx.x; k < capacity * 3;
       k += static_cast<int64_t>(chunks) * kListThreads)
    p.indices[k] = -1;
  if (chunk == 0 && threadIdx.x == 0) *p.count = *p.total = total;
}

// `unit`: 32 words of the fringe, one a lane.
template <class Tables>
__device__ __forceinline__ void mark_fringe(const Tables& a, const FringeArgs& f, int unit) {
  const PlaneArgs& own = a.plane[f.plane];
  const int index = unit * 32 + static_cast<int>(threadIdx.x % 32);
  uint32_t found = 0;
  if (index < f.words) {
    const int row = index / own.tiles.words(), x0 = (index - row * own.tiles.words()) * 32;
    const int n = row / own.tiles.size[0], y = row - n * own.tiles.size[0];
    const uint32_t wanted = unwritten(own.tiles, lookup(own, n), y, x0);
    for (int r = 0; r < f.consumers; ++r) {
      const Consumer& consumer = a.consumer[f.first_consumer + r];
      const PlaneArgs& out = a.plane[consumer.plane];
      found |= read_by(out.tiles, consumer.reader, lookup(out, n), y, x0, wanted & ~found);
    }
  }
  store_counted(found, unit * 32, f.words, f.bits, f.per_warp);
}

template <class Tables>
__global__ void __launch_bounds__(kListThreads) plane_kernel(const __grid_constant__ Tables a) {
  grid_dependency_release();
  if constexpr (Tables::kFar) grid_dependency_wait();
  int u = blockIdx.x, k = 0;
  if (u < a.list_ctas) {
    int chunks = list_chunks(a.plane[0].words, 1);
    while (u >= chunks) {
      u -= chunks;
      chunks = list_chunks(a.plane[++k].words, 1);
    }
    grid_dependency_wait();
    list_plane(a.plane[k], a.batch, u, chunks);
    return;
  }
  u = (u - a.list_ctas) * kListWarps + static_cast<int>(threadIdx.x / 32);
  while (k < a.fringes && u >= (a.fringe[k].words + 31) / 32) u -= (a.fringe[k++].words + 31) / 32;
  grid_dependency_wait();
  if (k < a.fringes) mark_fringe(a, a.fringe[k], u);
}

// ---- lists of fringes

template <class Tables>
__global__ void __launch_bounds__(kListThreads) pixel_kernel(const __grid_constant__ Tables a) {
  grid_dependency_release();
  if constexpr (Tables::kFar) grid_dependency_wait();
  int u = blockIdx.x, k = 0;
  while (u >= a.fringe[k].chunks) u -= a.fringe[k++].chunks;
  const PixelArgs& f = a.fringe[k];
  grid_dependency_wait();
  list_pixels(f.bits, f.per_warp, f.words, f.words_per_row, f.width, u, f.chunks, f.capacity, f.pixels, f.count);
}

}  // namespace sbnet::pyramid
