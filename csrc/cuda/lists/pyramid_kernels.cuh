// The kernels of mask_pyramid, and the tables of planes, fringes and consumers that they read: see pyramid.cu.
#pragma once
#include "core/lists/pyramid.h"
#include "cuda/common.cuh"
#include "cuda/lists/mask.cuh"

namespace sbnet::pyramid {

constexpr unsigned kAll = 0xffffffff;

// The mask, and what is left of it: [batch, strips, words] words of bits.
struct StripArgs {
  const void* mask;
  int64_t stride[3];
  double tol;
  DType dtype;
  bool vectors;  // 16-byte loads, where the mask begins at such an address
  int height, width, margin;
  int strip, strips, words;  // rows of a strip, strips of an image, words of a strip
  int units;                 // batch * strips * words
  uint32_t* bits;
  int32_t* flags;  // of the chunks of all lists: 0 until the chunk's entries are counted, then their number and 1
  int flag_count;
};

struct PlaneArgs {
  TiledPlane tiles;
  int words_per_row, words;  // of blocks: of a row of them, of the batch
  int lanes;                 // that search one rectangle
  int flags;                 // the first one of its chunks
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
static_assert(sizeof(StripArgs) + sizeof(SmallTables) <= 4096 && sizeof(StripArgs) + sizeof(LargeTables) <= 32764,
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

// ---- the mask

constexpr int kStripThreads = 256;

template <class T>
__device__ __forceinline__ uint32_t strip_word(const StripArgs& a, int n, int strip, int word) {
  constexpr int kVec = 16 / sizeof(T), kLanes = 32 / kVec;  // values of a load, lanes of a row
  const int lane = threadIdx.x % 32, y_end = min((strip + 1) * a.strip, a.height);
  const T* image = static_cast<const T*>(a.mask) + n * a.stride[0];
  uint32_t bits = 0;
  if (a.vectors && reinterpret_cast<uintptr_t>(a.mask) % 16 == 0) {
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
  for (int k = static_cast<int>(blockIdx.x * kStripThreads + threadIdx.x); k < a.flag_count;
       k += static_cast<int>(gridDim.x) * kStripThreads)
    a.flags[k] = 0;
  if (u >= a.units) return;
  const uint32_t bits = by_mask_dtype(a.dtype, [&](auto t) { return strip_word<decltype(t)>(a, n, strip, word); });
  if (threadIdx.x % 32 == 0) a.bits[u] = bits;
}

// ---- blocks

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

constexpr int kChunkThreads = 512, kChunkWarps = kChunkThreads / 32;
constexpr int kPlaneChunk = kChunkWarps;    // words of blocks that a CTA lists
constexpr int kPixelChunk = kChunkThreads;  // words of pixels
SBNET_HOST_DEVICE inline int chunks_of(const PlaneArgs& p) {
  return greater(1, (p.words + kPlaneChunk - 1) / kPlaneChunk);
}
SBNET_HOST_DEVICE inline int chunks_of(const FringeArgs& f) {
  return greater(1, (f.words + kPixelChunk - 1) / kPixelChunk);
}

// The words [first, first + count) of a plane's blocks go to `to`, which holds zeros: a CTA's work.
__device__ __forceinline__ void find_blocks(const StripArgs& a, const PlaneArgs& p, int first, int count,
                                            uint32_t* to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = p.tiles.count[1], rows = p.tiles.count[0];
  const int together = 32 / p.lanes,
            turns = (min(columns, 32) + together - 1) / together;  // blocks of a warp, of a word
  const uint32_t own = p.lanes == 32 ? kAll : (1u << p.lanes) - 1;
  for (int item = warp; item < count * turns; item += kChunkWarps) {
    const int at = item / turns, turn = item - at * turns, word = first + at;
    const int row = word / p.words_per_row, n = row / rows;
    const int base = turn * together, j = (word - row * p.words_per_row) * 32 + base + lane / p.lanes;
    bool set = false;
    if (j < columns)
      set = any_set(a, n, pyramid_span(p.tiles, 0, row - n * rows, a.height, a.margin),
                    pyramid_span(p.tiles, 1, j, a.width, a.margin), lane % p.lanes, p.lanes);
    const uint32_t votes = __ballot_sync(kAll, set);
    const uint32_t found = __ballot_sync(kAll, lane < together && votes >> lane * p.lanes % 32 & own);
    if (lane == 0) atomicOr(to + at, found << base);
  }
}

// What the chunks of a list before this one hold: each says so as soon as it knows. Chunks are CTAs in order, so that
// those which others wait for started first, and they wait for none behind them. To be called by whole warps.
__device__ __forceinline__ int listed_before(int32_t* flags, int chunk, int own) {
  volatile int32_t* flag = flags;
  if (threadIdx.x == 0) flag[chunk] = own + 1;
  int before = 0;
  for (int k = threadIdx.x % 32; k < chunk; k += 32) {
    int found = flag[k];
    while (!found) found = flag[k];
    before += found - 1;
  }
  return __reduce_add_sync(kAll, before);
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
__device__ __forceinline__ void list_plane(const StripArgs& a, const PlaneArgs& p, int batch, int chunk,
                                           uint32_t* bits) {
  const int rows = p.tiles.count[0], columns = p.tiles.count[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = chunk * kPlaneChunk, count = min(kPlaneChunk, p.words - first);
  find_blocks(a, p, first, count, bits);
  __syncthreads();
  const uint32_t word = lane < count ? bits[lane] : 0;
  const int own = __reduce_add_sync(kAll, __popc(word)),
            above = __reduce_add_sync(kAll, lane < warp ? __popc(word) : 0);
  const int before = listed_before(a.flags + p.flags, chunk, own);
  const auto blocks_to = [&](int at) {  // of the batch, in words before that
    const int row = at / p.words_per_row;
    return static_cast<int64_t>(row) * columns + min((at - row * p.words_per_row) * 32, columns);
  };
  if (warp < count) {
    const int at = first + warp, row = at / p.words_per_row, j = (at - row * p.words_per_row) * 32 + lane;
    const uint32_t mine = bits[warp];
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

// The active blocks of one image, of words in shared memory.
struct BitLookup {
  const uint32_t* bits;
  int first, words_per_row;  // the image's first word, which may lie before those that are there
  __device__ uint32_t operator()(int i, int j, int n) const {
    const uint32_t* word = bits + (first + i * words_per_row + j / 32);
    uint32_t found = word[0] >> (j % 32);
    if (j % 32 + n > 32) found |= word[1] << (32 - j % 32);
    return found & ~0u >> (32 - n);
  }
};
// The same from the mask's strips, where those words are too many.
struct StripLookup {
  const StripArgs& strips;
  const PlaneArgs& plane;
  int image;
  __device__ uint32_t operator()(int i, int j, int n) const {
    const Span rows = pyramid_span(plane.tiles, 0, i, strips.height, strips.margin);
    uint32_t found = 0;
    for (int k = 0; k < n; ++k) {
      const Span columns = pyramid_span(plane.tiles, 1, j + k, strips.width, strips.margin);
      found |= static_cast<uint32_t>(any_set(strips, image, rows, columns, 0, 1)) << k;
    }
    return found;
  }
};

constexpr int kRegionWords = 8192, kRegions = 32;
struct Regions {  // of a fringe's chunk: what its own plane and the consumers' need, as words in shared memory
  uint32_t bits[kRegionWords];
  int sums[kChunkWarps];
};

// Words of a plane's blocks, in order.
struct WordRange {
  int first, count;
};
// Of the blocks in rows of pixels from `begin`, of one image, to `end`, of the same or a later one.
struct PixelRow {
  int n, y;
};
__device__ __forceinline__ WordRange words_between(const PlaneArgs& p, PixelRow begin, PixelRow end) {
  const int last = p.tiles.size[0] - 1;
  const int from = static_cast<int>(p.tiles.block[0].quotient(min(max(begin.y, 0), last)));
  const int to = static_cast<int>(p.tiles.block[0].quotient(min(max(end.y, 0), last)));
  const int first = (begin.n * p.tiles.count[0] + from) * p.words_per_row;
  return {first, (end.n * p.tiles.count[0] + to + 1) * p.words_per_row - first};
}

template <class Tables>
__device__ __forceinline__ void list_fringe(const StripArgs& a, const Tables& tables, const FringeArgs& f, int chunk,
                                            Regions& shared) {
  const PlaneArgs& own = tables.plane[f.plane];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int height = own.tiles.size[0], width = own.tiles.size[1], per_row = own.tiles.words();
  const int first = chunk * kPixelChunk, count = max(min(kPixelChunk, f.words - first), 0);
  const auto row_of = [&](int word) {
    const int row = word / per_row, n = row / height;
    return PixelRow{n, row - n * height};
  };
  const PixelRow begin = row_of(first), end = row_of(max(first + count - 1, 0));
  const auto read_in = [&](int r) {  // by the r-th consumer; of number -1, those of the plane itself
    if (r < 0) return words_between(own, begin, end);
    const Consumer& c = tables.consumer[f.first_consumer + r];
    return words_between(tables.plane[c.plane], {begin.n, c.reader.first_reader(0, begin.y)},
                         {end.n, c.reader.last_reader(0, end.y)});
  };
  int room = 0;
  for (int r = -1; r < f.consumers; ++r) room += min(read_in(r).count, kRegionWords);
  const bool fits = room <= kRegionWords && f.consumers < kRegions;
  if (fits && count) {
    int at = 0;
    for (int r = -1; r < f.consumers; ++r) {
      const WordRange words = read_in(r);
      find_blocks(a, tables.plane[r < 0 ? f.plane : tables.consumer[f.first_consumer + r].plane], words.first,
                  words.count, shared.bits + at);
      at += words.count;
    }
  }
  __syncthreads();
  const int index = first + static_cast<int>(threadIdx.x);
  uint32_t found = 0;
  if (static_cast<int>(threadIdx.x) < count) {
    const PixelRow row = row_of(index);
    const int x0 = (index - (row.n * height + row.y) * per_row) * 32;
    int at = 0;
    const auto active = [&](const PlaneArgs& p, int r) {
      const WordRange words = read_in(r);
      const BitLookup lookup = {shared.bits, at + row.n * p.tiles.count[0] * p.words_per_row - words.first,
                                p.words_per_row};
      at += words.count;
      return lookup;
    };
    const uint32_t wanted = fits ? unwritten(own.tiles, active(own, -1), row.y, x0)
                                 : unwritten(own.tiles, StripLookup{a, own, row.n}, row.y, x0);
    for (int r = 0; r < f.consumers; ++r) {
      const Consumer& consumer = tables.consumer[f.first_consumer + r];
      const PlaneArgs& out = tables.plane[consumer.plane];
      found |= fits ? read_by(out.tiles, consumer.reader, active(out, r), row.y, x0, wanted & ~found)
                    : read_by(out.tiles, consumer.reader, StripLookup{a, out, row.n}, row.y, x0, wanted & ~found);
    }
  }
  const int mine = __reduce_add_sync(kAll, __popc(found));
  if (lane == 0) shared.sums[warp] = mine;
  __syncthreads();
  const int sum = lane < kChunkWarps ? shared.sums[lane] : 0;
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
    list_kernel(const __grid_constant__ StripArgs a, const __grid_constant__ Tables tables) {
  __shared__ Regions shared;
  grid_dependency_release();
  for (int k = threadIdx.x; k < kRegionWords; k += kChunkThreads) shared.bits[k] = 0;
  if constexpr (Tables::kFar) grid_dependency_wait();
  int u = blockIdx.x, k = 0;
  while (k < tables.planes && u >= chunks_of(tables.plane[k])) u -= chunks_of(tables.plane[k++]);
  const bool blocks = k < tables.planes;
  if (!blocks) {
    k = 0;
    while (u >= chunks_of(tables.fringe[k])) u -= chunks_of(tables.fringe[k++]);
  }
  __syncthreads();
  grid_dependency_wait();
  if (blocks)
    list_plane(a, tables.plane[k], tables.batch, u, shared.bits);
  else
    list_fringe(a, tables, tables.fringe[k], u, shared);
}

}  // namespace sbnet::pyramid
