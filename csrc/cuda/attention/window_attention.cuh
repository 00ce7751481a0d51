// What a CTA of window attention needs before its products: its shared memory, which pixels are active, lists of them.
#pragma once
#include <algorithm>

#include "core/attention/window_attention.h"
#include "core/settled.h"
#include "cuda/attention/tiles.cuh"
#include "cuda/scan.cuh"

namespace sbnet::portable {

constexpr const char* kWindowOp = "window_attention";
constexpr int kKeys = WindowTile::kKeys;

// Of heads of 32 channels two rows lie side by side: eight of them meet no bank twice so.
template <>
__device__ __forceinline__ uint32_t word_at<32>(int row, int word) {
  return row * 64 + ((word ^ (row >> 1 & 3)) << 4);
}

// kHeld: a matrix whose part of a window a CTA has in shared memory.
enum class Bias { kNone, kMatrix, kHeld, kTables };

struct Args {
  WindowAttentionParams p;
  FastDiv columns, block_rows, block_columns, table_columns;
  uint32_t tiles;   // of a window's rows
  bool row_lists;   // a tile's rows are active ones; else, of very large windows, rows that follow one another
  bool key_pixels;  // keys are listed by their pixels, from 1 on, where they fit 16 bits; else by their places
  bool settled;     // rows and keys may be listed before the launch ahead has ended
  uint32_t items;   // tiles of all windows, heads and images
  FastDiv rows;
};

template <class T>
__device__ float number(const WindowNumbers& n, int64_t i) {
  return n.dtype == DType::kF32 ? static_cast<const float*>(n.data)[i] : to_float(static_cast<const T*>(n.data)[i]);
}

// Is a pixel of q's plane active, or of that of keys?
struct Active {
  const Args& a;
  int64_t n;
  __device__ bool query(int64_t pixel) const {
    const WindowAttentionParams& p = a.p;
    uint32_t y, x;
    a.columns.divmod(static_cast<uint32_t>(pixel), &y, &x);
    const int64_t row = n * p.grid.count[0] + a.block_rows.quotient(y);
    return p.block_map[row * p.grid.count[1] + a.block_columns.quotient(x)] >= 0;
  }
  __device__ bool key(int64_t pixel) const {
    return a.p.active_keys ? a.p.active_keys[n * a.p.pixels_of_keys() + pixel] != 0 : query(pixel);
  }
};

// The pixel of an entry of an index, -1: padding.
__device__ inline int64_t pixel_of(const int64_t* index, int64_t at, int pixels) {
  const int64_t pixel = index[at] - 1;
  return pixel >= 0 && pixel < pixels ? pixel : -1;
}

// How many of `length` places are there; put(k, place) is called for the k-th of them. Every thread calls.
template <int kThreads, class There, class Put>
__device__ int list_places(int length, int* sums, const There& there, const Put& put) {
  static_assert(kMostWindowKeys <= 64 * kThreads, "what a thread lists is the bits of a word");
  const int each = (length + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, length), end = min(begin + each, length);
  uint64_t bits = 0;
  constexpr int kAtOnce = 8;  // loads under way
  for (int i = begin; i < end; i += kAtOnce)
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u < end) bits |= static_cast<uint64_t>(there(i + u)) << (i + u - begin);
  int all, at = sum_before<kThreads>(__popcll(bits), sums, &all);
  for (; bits; bits &= bits - 1) put(at++, begin + __ffsll(static_cast<long long>(bits)) - 1);
  __syncthreads();
  return all;
}

// The window, head and image of a CTA, and its first row.
struct WindowWork {
  int window, first, head;
  int64_t n;
  __device__ WindowWork(const Args& a, int rows, uint32_t item = blockIdx.x) {
    const uint32_t tiles = static_cast<uint32_t>(a.p.windows) * a.tiles, tile = item % tiles;
    window = tile / a.tiles, first = tile % a.tiles * rows, head = item / tiles % a.p.heads;
    n = item / tiles / a.p.heads;
  }
};

// Which of up to 32 items of a CTA, `first` and every gridDim.x-th behind it, have a row in their window that is
// active: a bit each. Items of long windows all count as such. Every thread calls.
template <int kThreads>
__device__ uint32_t active_items(const Args& a, uint32_t first, uint32_t* bits) {
  const WindowAttentionParams& p = a.p;
  if (threadIdx.x == 0) *bits = 0;
  __syncthreads();
  const int entries = min((a.items - first + gridDim.x - 1) / gridDim.x, 32u) * p.rows;
  constexpr int kAtOnce = 4;  // loads under way
  for (int i = threadIdx.x; i < entries; i += kThreads * kAtOnce) {
    uint32_t found[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int at = i + u * kThreads;
      if (at >= entries) continue;
      const uint32_t k = a.rows.quotient(at);
      const WindowWork work(a, 0, first + k * gridDim.x);
      const int64_t place = int64_t{work.window} * p.rows + at - static_cast<int>(k) * p.rows;
      const int64_t pixel = pixel_of(p.row_index, place, p.queries());
      if (pixel >= 0 && Active{a, work.n}.query(pixel)) found[u] = 1u << k;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (found[u]) atomicOr(bits, found[u]);
  }
  __syncthreads();
  return *bits;
}

// Lists the pixels (-1: none) and places of a tile's rows; how many: 0 where none is active. Every thread calls.
template <int kThreads, int kRows>
__device__ int list_rows(const Args& a, const WindowWork& work, int* pixels, int* places, int* sums) {
  const WindowAttentionParams& p = a.p;
  const int64_t* index = p.row_index + int64_t{work.window} * p.rows;
  const Active active = {a, work.n};
  const int first = work.first;
  if (const auto& listed = p.listed_rows; listed.order) {
    const int rows = min(listed.lengths[work.n] - first, kRows);
    for (int i = threadIdx.x; i < rows; i += kThreads) {
      const int64_t pixel = listed.order[work.n * listed.capacity + first + i];
      if (pixel >= 0 && pixel < p.queries()) pixels[i] = places[i] = static_cast<int>(pixel);
    }
    __syncthreads();
    return max(rows, 0);
  }
  const auto there = [&](int place) {
    const int64_t pixel = pixel_of(index, place, p.queries());
    return pixel >= 0 && active.query(pixel);
  };
  const auto put = [&](int at, int place) {
    if (at < first || at >= first + kRows) return;
    places[at - first] = place;
    pixels[at - first] = static_cast<int>(index[place]) - 1;
  };
  if (a.row_lists) return max(min(list_places<kThreads>(p.rows, sums, there, put) - first, kRows), 0);
  bool any = false;
  for (int place = first + threadIdx.x; place < min(first + kRows, p.rows); place += kThreads)
    if (there(place)) put(place, place), any = true;
  return __syncthreads_or(any) ? kRows : 0;
}

// Lists the keys of a window. A bias needs their places, of which tables have the row and column, a byte each; without
// one they are pixels where they can be, and nothing has to wait for the index again. Every thread calls.
template <int kThreads, Bias kBias>
__device__ int list_keys(const Args& a, const WindowWork& work, uint16_t* list, int* sums) {
  const WindowAttentionParams& p = a.p;
  const int64_t* index = p.key_index + int64_t{work.window} * p.keys;
  const Active active = {a, work.n};
  const auto there = [&](int place) {
    const int64_t pixel = pixel_of(index, place, p.pixels_of_keys());
    return pixel < 0 || active.key(pixel);
  };
  const auto put = [&](int at, int place) {
    if constexpr (kBias == Bias::kTables) {
      uint32_t y, x;
      a.table_columns.divmod(place, &y, &x);
      place = y << 8 | x;
    }
    if (kBias == Bias::kNone && a.key_pixels)
      place = p.listed_keys.order ? place + 1 : static_cast<int>(pixel_of(index, place, p.pixels_of_keys())) + 1;
    list[at] = static_cast<uint16_t>(place);
  };
  if (const auto& listed = p.listed_keys; listed.order) {  // places are pixels
    const int keys = min(listed.lengths[work.n], p.keys);
    for (int i = threadIdx.x; i < keys; i += kThreads) {
      const int64_t pixel = listed.order[work.n * listed.capacity + i];
      put(i, pixel >= 0 && pixel < p.keys ? static_cast<int>(pixel) : 0);
    }
    __syncthreads();
    return max(keys, 0);
  }
  return list_places<kThreads>(p.keys, sums, there, put);
}

// The pixel of a listed key, -1: padding.
template <Bias kBias>
__device__ int64_t pixel_of_key(const Args& a, const int64_t* index, int listed) {
  if (kBias == Bias::kNone && a.key_pixels) return listed - 1;
  if constexpr (kBias == Bias::kTables) listed = (listed >> 8) * a.p.table_columns + (listed & 255);
  return pixel_of(index, listed, a.p.pixels_of_keys());
}

// Copies a matrix's numbers of listed rows and keys, one step of these.
template <int kThreads, class T>
__device__ void hold_bias(const T* bias, int row_length, const int* row_places, int rows, const uint16_t* list,
                          int keys, T* to, int pitch) {
  constexpr int kStep = kThreads / kKeys, kAtOnce = 8;  // rows; loads under way
  const int key = threadIdx.x % kKeys;
  if (key >= keys) return;
  bias += list[key], to += key;
  for (int row = threadIdx.x / kKeys; row < rows; row += kStep * kAtOnce) {
    T held[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (row + u * kStep < rows) held[u] = bias[row_places[row + u * kStep] * row_length];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (row + u * kStep < rows) to[(row + u * kStep) * pitch] = held[u];
  }
}

// A row of q, k or v of a pixel.
template <class T>
__device__ const T* head_of(const TensorView& t, int64_t n, int64_t start, int64_t channel) {
  return static_cast<const T*>(t.data) + n * t.stride[0] + start + channel;
}

// One by the length of a row of a tile, or by `least`.
template <class T, int kDim>
__device__ float length_factor(const uint8_t* tile, int row, int dim, float least) {
  float sum = 0.f;
  for (int word = 0; word * 8 < dim; ++word) {
    const auto v = *reinterpret_cast<const Pack<T, 8>*>(tile + word_at<kDim>(row, word));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(to_float(v.v[e]), to_float(v.v[e]), sum);
  }
  return 1.f / fmaxf(sqrtf(sum), least);
}

// A row of a tile by one of a table.
template <class T, int kDim>
__device__ float product_of(const uint8_t* tile, int row, const T* other, int dim) {
  float sum = 0.f;
#pragma unroll 4
  for (int word = 0; word * 8 < dim; ++word) {
    const auto left = *reinterpret_cast<const Pack<T, 8>*>(tile + word_at<kDim>(row, word));
    const auto right = *reinterpret_cast<const Pack<T, 8>*>(other + word * 8);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(to_float(left.v[e]), to_float(right.v[e]), sum);
  }
  return sum;
}

// What tables add to scores: of a row i C + j, its query by row i of one table and by row j of the other, as
// product(row, table's row) has it.
template <class T, int kThreads, class Product>
__device__ void relative_products(const Args& a, const int* places, int rows, float* to, const Product& product) {
  const WindowAttentionParams& p = a.p;
  const int width = p.table_rows + p.table_columns;
  const int stride = WindowTile::relative_stride(p.table_rows, p.table_columns);
  for (int i = threadIdx.x; i < rows * width; i += kThreads) {
    const int row = i / width, other = i % width;
    uint32_t y, x;
    a.table_columns.divmod(places[row], &y, &x);
    const T* table =
        other < p.table_rows
            ? static_cast<const T*>(p.row_table) + (int64_t{y} * p.table_rows + other) * p.dim
            : static_cast<const T*>(p.column_table) + (int64_t{x} * p.table_columns + other - p.table_rows) * p.dim;
    to[row * stride + other] = product(row, table);
  }
}

// Launches a kernel of CTAs of kThreads, `tile.rows` rows of a window and `more` bytes of shared memory: one for each
// item, or as many on a multiprocessor as `each` says.
template <int kThreads, void (*kernel)(Args)>
Status launch_windows(const WindowAttentionParams& p, const WindowTile& tile, const DeviceInfo& device,
                      cudaStream_t stream, int more = 0, int each = 0) {
  const uint32_t tiles = (p.rows + tile.rows - 1) / tile.rows;
  const int64_t items = size_product({p.windows, tiles, p.heads, p.q.size[0]});
  SBNET_CHECK(items <= INT32_MAX, "%s: q: expected fewer than 2^31 tiles of rows, got %lld", kWindowOp,
              static_cast<long long>(items));
  const int64_t ctas = each ? std::min(items, int64_t{each} * device.sm_count) : items;
  SBNET_TRY(allow_shared<kernel>(kWindowOp, device, kWindowShared));
  // Lists of rows and keys, and masks of keys, may be what the launch ahead writes; the map of blocks is not.
  const bool settled = inputs_settled() && !p.active_keys && !p.listed_rows.order && !p.listed_keys.order;
  const Args args = {p,
                     FastDiv(p.q.size[3]),
                     FastDiv(p.grid.size[0]),
                     FastDiv(p.grid.size[1]),
                     FastDiv(p.table_columns),
                     tiles,
                     p.rows <= kMostWindowKeys,
                     p.pixels_of_keys() < 0xffff,
                     settled,
                     static_cast<uint32_t>(items),
                     FastDiv(p.rows)};
  const int bytes = tile.bytes(p.keys, p.table_rows, p.table_columns) + more;
  SBNET_CUDA_TRY(kWindowOp, launch_dependent(device, kernel, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), bytes,
                                             stream, args));
  return ok_status();
}

Status launch_window_attention_simt(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream);

}  // namespace sbnet::portable
