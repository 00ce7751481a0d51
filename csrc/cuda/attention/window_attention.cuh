// What a CTA of window attention needs before its products: its shared memory, which pixels are active, lists of them.
#pragma once
#include "core/attention/window_attention.h"
#include "cuda/attention/tiles.cuh"

namespace sbnet::portable {

constexpr const char* kOp = "window_attention";
constexpr int kThreads = 128, kWarps = kThreads / 32, kKeys = 64, kMostOfThread = kMostWindowKeys / kThreads;
static_assert(kMostOfThread == 64, "what a thread lists is the bits of a word");

enum class Bias { kNone, kMatrix, kTables };

struct Args {
  WindowAttentionParams p;
  FastDiv columns, block_rows, block_columns, table_columns;
  uint32_t tiles;  // of a window's rows
  bool row_lists;  // a tile's rows are active ones; else, of very large windows, rows that follow one another
};

// A tile of 16 * kEach rows a warp, and bytes of shared memory: queries, two stages of keys and values, what belongs to
// rows, the list of keys, and the products of queries with tables.
template <class T_, int kDim_, int kEach_, Bias kBias_>
struct Config {
  using T = T_;
  static constexpr int kDim = kDim_, kEach = kEach_, kRows = 16 * kWarps * kEach;
  static constexpr Bias kBias = kBias_;
  static constexpr int kKeyBytes = kKeys * kDim * 2, kStage = 2 * kKeyBytes, kStages = kRows * kDim * 2,
                       kRowPixels = kStages + 2 * kStage, kRowPlaces = kRowPixels + kRows * 4,
                       kRowFactors = kRowPlaces + kRows * 4, kKeyFactors = kRowFactors + kRows * 4,
                       kSums = kKeyFactors + kKeys * 4, kList = kSums + kWarps * 4;
  static __host__ __device__ int relative_at(const WindowAttentionParams& p) {
    return kList + (p.keys * 2 + 15) / 16 * 16;
  }
  // Of a row of products: eight rows of them, a few columns apart, lie in different banks.
  static __host__ __device__ int relative_stride(const WindowAttentionParams& p) {
    return (p.table_rows + p.table_columns + 23) / 32 * 32 + 8;
  }
  static int bytes(const WindowAttentionParams& p) {
    return relative_at(p) + (p.row_table ? kRows * relative_stride(p) * 4 : 0);
  }
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
  return pixel < pixels ? pixel : -1;
}

// How many of `length` places are there; put(k, place) is called for the k-th of them. Every thread calls.
template <class There, class Put>
__device__ int list_places(int length, int* sums, const There& there, const Put& put) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (length + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, length), end = min(begin + each, length);
  uint64_t bits = 0;
  constexpr int kAtOnce = 8;  // loads under way
  for (int i = begin; i < end; i += kAtOnce)
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u < end) bits |= static_cast<uint64_t>(there(i + u)) << (i + u - begin);
  const int mine = __popcll(bits);
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int at = sum - mine, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) at += sums[w];
    all += sums[w];
  }
  for (; bits; bits &= bits - 1) put(at++, begin + __ffsll(static_cast<long long>(bits)) - 1);
  __syncthreads();
  return all;
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

// What tables add to scores in base 2: of a row i C + j, queries by row i of one table and by row j of the other.
template <class C>
__device__ void relative_products(const Args& a, const uint8_t* queries, const int* places, int rows, float* to) {
  using T = typename C::T;
  const WindowAttentionParams& p = a.p;
  const int width = p.table_rows + p.table_columns, stride = C::relative_stride(p);
  for (int i = threadIdx.x; i < rows * width; i += kThreads) {
    const int row = i / width, other = i % width;
    uint32_t y, x;
    a.table_columns.divmod(places[row], &y, &x);
    const T* table =
        other < p.table_rows
            ? static_cast<const T*>(p.row_table) + (int64_t{y} * p.table_rows + other) * p.dim
            : static_cast<const T*>(p.column_table) + (int64_t{x} * p.table_columns + other - p.table_rows) * p.dim;
    float sum = 0.f;
#pragma unroll 4
    for (int w = 0; w * 8 < p.dim; ++w) {
      const auto left = *reinterpret_cast<const Pack<T, 8>*>(queries + word_at<C::kDim>(row, w));
      const auto right = *reinterpret_cast<const Pack<T, 8>*>(table + w * 8);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(to_float(left.v[e]), to_float(right.v[e]), sum);
    }
    to[row * stride + other] = sum * kLog2e;
  }
}

}  // namespace sbnet::portable
