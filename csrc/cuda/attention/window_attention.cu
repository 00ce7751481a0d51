// Attention within windows by tensor cores, sm_80 on: a CTA has 64 active rows of a window, for one head of an image.
// The window's active rows and keys are listed in shared memory first, so that its cost follows them, not the window.
#include "core/attention/window_attention.h"

#include "cuda/attention/tiles.cuh"

namespace sbnet::portable {
namespace {

constexpr const char* kOp = "window_attention";
constexpr int kThreads = 128, kWarps = kThreads / 32, kRows = 64, kEntries = kMostWindowKeys / kThreads;
static_assert(kEntries == 64, "what a thread lists is the bits of a word");

struct Args {
  WindowAttentionParams p;
  FastDiv columns, block_rows, block_columns, table_columns;
  int tiles;       // of a window's rows
  bool row_lists;  // a tile's rows are active ones; else, of very large windows, rows that follow one another
};

// Bytes of shared memory: queries, two stages of keys and values, what belongs to rows, the list of keys, and the
// products of queries with tables.
template <int kDim>
struct Memory {
  static constexpr int kTileBytes = kRows * kDim * 2, kStage = 2 * kTileBytes, kStages = kTileBytes,
                       kRowPixels = kStages + 2 * kStage, kRowPlaces = kRowPixels + kRows * 4,
                       kRowFactors = kRowPlaces + kRows * 4, kKeyFactors = kRowFactors + kRows * 4,
                       kSums = kKeyFactors + kRows * 4, kKeys = kSums + kWarps * 4;
  static int bytes(const WindowAttentionParams& p) {
    const int lists = (p.keys * 2 + 15) / 16 * 16;
    return kKeys + lists + (p.row_table ? kRows * (p.table_rows + p.table_columns) * 4 : 0);
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
__device__ int64_t pixel_of(const int64_t* index, int64_t at, int pixels) {
  const int64_t pixel = index[at] - 1;
  return pixel < pixels ? pixel : -1;
}

// How many of `length` places are there; put(k, place) is called for the k-th of them. Every thread calls.
template <class There, class Put>
__device__ int list_places(int length, int* sums, const There& there, const Put& put) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (length + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, length), end = min(begin + each, length);
  uint64_t bits = 0;
  for (int i = begin; i < end; ++i) bits |= static_cast<uint64_t>(there(i)) << (i - begin);
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

// The sum of squares of a row of a tile, by the two threads that have it: every thread calls, for row threadIdx.x / 2.
template <class T, int kDim>
__device__ float length_factor(const uint8_t* tile, int dim, float least) {
  const int row = threadIdx.x / 2;
  float sum = 0.f;
  for (int word = threadIdx.x % 2; word * 8 < dim; word += 2) {
    const auto v = *reinterpret_cast<const Pack<T, 8>*>(tile + word_at<kDim>(row, word));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(to_float(v.v[e]), to_float(v.v[e]), sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return 1.f / fmaxf(sqrtf(sum), least);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 4 : 2) window_attention_kernel(const __grid_constant__ Args a) {
  using M = Memory<kDim>;
  constexpr int kWords = kDim / 8, kPass = kThreads / kWords;
  extern __shared__ __align__(1024) uint8_t shared[];
  const WindowAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int window = blockIdx.x / a.tiles, first = blockIdx.x % a.tiles * kRows, head = blockIdx.y;
  const int64_t n = blockIdx.z;
  int* row_pixels = reinterpret_cast<int*>(shared + M::kRowPixels);
  int* row_places = reinterpret_cast<int*>(shared + M::kRowPlaces);
  float* row_factors = reinterpret_cast<float*>(shared + M::kRowFactors);
  float* key_factors = reinterpret_cast<float*>(shared + M::kKeyFactors);
  int* sums = reinterpret_cast<int*>(shared + M::kSums);
  uint16_t* key_list = reinterpret_cast<uint16_t*>(shared + M::kKeys);
  float* relative = reinterpret_cast<float*>(shared + M::kKeys + (p.keys * 2 + 15) / 16 * 16);
  const int64_t* row_index = p.row_index + int64_t{window} * p.rows;
  const int64_t* key_index = p.key_index + int64_t{window} * p.keys;
  if (threadIdx.x < kRows) row_pixels[threadIdx.x] = -1, row_places[threadIdx.x] = 0;
  grid_dependency_wait();
  const Active active = {a, n};
  const auto row_there = [&](int place) {
    const int64_t pixel = pixel_of(row_index, place, p.queries());
    return pixel >= 0 && active.query(pixel);
  };
  const auto put_row = [&](int at, int place) {
    if (at < first || at >= first + kRows) return;
    row_places[at - first] = place;
    row_pixels[at - first] = static_cast<int>(row_index[place]) - 1;
  };
  int rows;  // of this tile
  __syncthreads();
  if (a.row_lists) {
    rows = min(list_places(p.rows, sums, row_there, put_row) - first, kRows);
  } else {
    const int place = first + threadIdx.x;
    const bool there = threadIdx.x < kRows && place < p.rows && row_there(place);
    if (there) put_row(place, place);
    rows = __syncthreads_or(there) ? kRows : 0;
  }
  if (rows <= 0) return;
  // Queries, and keys meanwhile.
  const uint32_t memory = shared_address(shared);
  const int word = threadIdx.x % kWords;
  const auto copy = [&](uint32_t to, int row, const T* from) {  // null: zeros
    cp_async_16(to + word_at<kDim>(row, word), from ? from + word * 8 : static_cast<const T*>(p.q.data), from);
  };
  const int64_t q_stride = p.stride(p.q), k_stride = p.stride(p.k), v_stride = p.stride(p.v);
  const T* q = static_cast<const T*>(p.q.data) + n * p.q.stride[0] + p.starts[0] + head * p.dim;
  const T* k = static_cast<const T*>(p.k.data) + n * p.k.stride[0] + p.starts[1] + head * p.dim;
  const T* v = static_cast<const T*>(p.v.data) + n * p.v.stride[0] + p.starts[2] + head * p.value_dim;
#pragma unroll
  for (int row = threadIdx.x / kWords; row < kRows; row += kPass) {
    const int pixel = row_pixels[row];
    copy(memory, row, pixel >= 0 && word * 8 < p.dim ? q + pixel * q_stride : nullptr);
  }
  cp_async_commit();
  const auto key_there = [&](int place) {
    const int64_t pixel = pixel_of(key_index, place, p.pixels_of_keys());
    return pixel < 0 || active.key(pixel);
  };
  const int keys = list_places(p.keys, sums, key_there, [&](int at, int place) { key_list[at] = place; });
  const T* k_fill = p.k_fill ? static_cast<const T*>(p.k_fill) + head * p.dim : nullptr;
  const T* v_fill = p.v_fill ? static_cast<const T*>(p.v_fill) + head * p.value_dim : nullptr;
  const auto load = [&](int k0, int stage) {
    const uint32_t to = memory + M::kStages + stage * M::kStage;
#pragma unroll
    for (int row = threadIdx.x / kWords; row < kRows; row += kPass) {
      const T *from_k = nullptr, *from_v = nullptr;
      if (k0 + row < keys) {
        const int64_t pixel = pixel_of(key_index, key_list[k0 + row], p.pixels_of_keys());
        from_k = pixel >= 0 ? k + pixel * k_stride : k_fill;
        from_v = pixel >= 0 ? v + pixel * v_stride : v_fill;
      }
      copy(to, row, word * 8 < p.dim ? from_k : nullptr);
      copy(to + M::kTileBytes, row, word * 8 < p.value_dim ? from_v : nullptr);
    }
    cp_async_commit();
  };
  load(0, 0);
  cp_async_wait<1>();
  __syncthreads();
  float factor = p.scale * (p.scales.data ? number<T>(p.scales, head) : 1.f) * kLog2e;
  if (p.normalize > 0.f) {
    const float by = length_factor<T, kDim>(shared, p.dim, p.normalize);
    if (threadIdx.x % 2 == 0) row_factors[threadIdx.x / 2] = by;
  }
  if (p.row_table) {  // of a row i C + j, queries by row i of one table and by row j of the other
    const int R = p.table_rows, C = p.table_columns, width = R + C;
    for (int i = threadIdx.x; i < rows * width; i += kThreads) {
      const int row = i / width, other = i % width;
      uint32_t y, x;
      a.table_columns.divmod(row_places[row], &y, &x);
      const T* table = other < R ? static_cast<const T*>(p.row_table) + (int64_t{y} * R + other) * p.dim
                                 : static_cast<const T*>(p.column_table) + (int64_t{x} * C + other - R) * p.dim;
      float sum = 0.f;
      for (int w = 0; w * 8 < p.dim; ++w) {
        const auto left = *reinterpret_cast<const Pack<T, 8>*>(shared + word_at<kDim>(row, w));
        const auto right = *reinterpret_cast<const Pack<T, 8>*>(table + w * 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(to_float(left.v[e]), to_float(right.v[e]), sum);
      }
      relative[row * width + other] = sum * kLog2e;
    }
  }
  __syncthreads();
  const int w0 = warp * 16, mine[2] = {w0 + lane / 4, w0 + lane / 4 + 8};
  const bool works = w0 < rows;
  uint32_t queries[kWords / 2][4];
#pragma unroll
  for (int d = 0; d < kWords / 2; ++d) load_matrix_x4((memory + left_at<kDim>(w0)) ^ (d << 5), queries[d]);
  float row_factor[2];
  const float* row_relative[2];
  int64_t bias_at[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_factor[r] = factor * (p.normalize > 0.f ? row_factors[mine[r]] : 1.f);
    row_relative[r] = relative + mine[r] * (p.table_rows + p.table_columns);
    bias_at[r] = (((p.bias_windows > 1 ? window : 0) * int64_t{p.heads} + head) * p.rows + row_places[mine[r]]) *
                 p.keys;
  }
  float out[kWords][4] = {}, base[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int k0 = 0, stage = 0; k0 < keys; k0 += kRows, stage ^= 1) {
    if (k0 + kRows < keys) {
      load(k0 + kRows, stage ^ 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    const int tile = M::kStages + stage * M::kStage;
    if (p.normalize > 0.f) {
      const float by = length_factor<T, kDim>(shared + tile, p.dim, p.normalize);
      if (threadIdx.x % 2 == 0) key_factors[threadIdx.x / 2] = by;
      __syncthreads();
    }
    if (works) {
      float score[kRows / 8][4] = {};
      const uint32_t k_at = memory + tile + columns_at<kDim>();
#pragma unroll
      for (int d = 0; d < kWords / 2; ++d) {
        if (d * 16 >= p.dim) break;
#pragma unroll
        for (int j = 0; j < kRows / 16; ++j) {
          uint32_t b[4];
          load_matrix_x4((k_at ^ (d << 5)) + j * 16 * kDim * 2, b);
          Product<T>::add(score[2 * j], queries[d], b[0], b[1]);
          Product<T>::add(score[2 * j + 1], queries[d], b[2], b[3]);
        }
      }
      float most[2] = {base[0], base[1]};
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = j * 8 + lane % 4 * 2 + e;
          const bool there = k0 + at < keys;
          const int place = there ? key_list[k0 + at] : 0;
          const float by = p.normalize > 0.f ? key_factors[at] : 1.f;
          uint32_t y = 0, x = 0;
          if (p.row_table) a.table_columns.divmod(place, &y, &x);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& s = score[j][2 * r + e];
            s *= row_factor[r] * by;
            if (p.bias.data) s = fmaf(number<T>(p.bias, bias_at[r] + place), kLog2e, s);
            if (p.row_table) s += row_relative[r][y] + row_relative[r][p.table_rows + x];
            if (!there) s = -INFINITY;
            most[r] = fmaxf(most[r], s);
          }
        }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        if (most[r] == -INFINITY) most[r] = -3e38f;  // no key yet: -inf less itself would be NaN
        const float shrink = exp2f(base[r] - most[r]);
        base[r] = most[r], total[r] *= shrink;
#pragma unroll
        for (int j = 0; j < kWords; ++j) out[j][2 * r] *= shrink, out[j][2 * r + 1] *= shrink;
      }
      const uint32_t v_at = memory + tile + M::kTileBytes + left_at<kDim>(0);
#pragma unroll
      for (int c = 0; c < kRows / 16; ++c) {
        if (k0 + c * 16 >= keys) break;
        uint32_t weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&s)[4] = score[2 * c + i / 2];
          const int r = i % 2;
          const float left = exp2_approx(s[2 * r] - base[r]), right = exp2_approx(s[2 * r + 1] - base[r]);
          total[r] += left + right;
          weights[i] = pair<T>(left, right);
        }
#pragma unroll
        for (int d = 0; d < kWords / 2; ++d) {
          if (d * 16 >= p.value_dim) break;
          uint32_t b[4];
          load_matrix_x4_transposed((v_at ^ (d << 5)) + c * 16 * kDim * 2, b);
          Product<T>::add(out[2 * d], weights, b[0], b[1]);
          Product<T>::add(out[2 * d + 1], weights, b[2], b[3]);
        }
      }
    }
    __syncthreads();  // the stage is free
  }
  cp_async_wait<0>();
  const int64_t out_stride = p.stride(p.out);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    const int pixel = row_pixels[mine[r]];
    if (pixel < 0) continue;
    const float by = total[r] != 0.f ? 1.f / total[r] : 0.f;
    T* to = static_cast<T*>(p.out.data) + n * p.out.stride[0] + pixel * out_stride + head * p.value_dim + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kWords; ++j)
      if (j * 8 < p.value_dim)
        *reinterpret_cast<uint32_t*>(to + j * 8) = pair<T>(out[j][2 * r] * by, out[j][2 * r + 1] * by);
  }
}

template <class T, int kDim>
Status launch(const Args& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = window_attention_kernel<T, kDim>;
  constexpr int kMost = 99 * 1024;
  const WindowAttentionParams& p = a.p;
  const int bytes = Memory<kDim>::bytes(p);
  SBNET_CHECK(bytes <= kMost, "%s: row_table, column_table: expected fewer rows and columns, got %d and %d", kOp,
              p.table_rows, p.table_columns);
  const int64_t ctas = int64_t{p.windows} * a.tiles;
  SBNET_CHECK(ctas <= INT32_MAX && p.heads <= 65535 && p.q.size[0] <= 65535,
              "%s: q: expected fewer than 2^16 images and heads, and 2^31 tiles of rows", kOp);
  SBNET_TRY(allow_shared<kernel>(kOp, device, kMost));
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(p.heads), static_cast<unsigned>(p.q.size[0]));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, grid, dim3(kThreads), bytes, stream, a));
  return ok_status();
}

}  // namespace
}  // namespace sbnet::portable

sbnet::Status sbnet_window_attention_cuda(const sbnet::WindowAttentionParams* p, void* stream_handle) {
  using namespace sbnet;
  using namespace sbnet::portable;
  SBNET_TRY(validate(*p));
  SBNET_CHECK(p->q.dtype != DType::kF32, "%s: q: dtype: expected float16 or bfloat16 on CUDA, got float32", kOp);
  if (!p->q.size[0] || !p->windows || !p->rows) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Args args = {*p, FastDiv(p->q.size[3]), FastDiv(p->grid.size[0]), FastDiv(p->grid.size[1]),
                     FastDiv(p->table_columns), (p->rows + kRows - 1) / kRows, p->rows <= kMostWindowKeys};
  const bool narrow = p->dim <= 64 && p->value_dim <= 64;
  if (p->q.dtype == DType::kF16)
    return narrow ? launch<__half, 64>(args, device, stream) : launch<__half, 128>(args, device, stream);
  return narrow ? launch<__nv_bfloat16, 64>(args, device, stream) : launch<__nv_bfloat16, 128>(args, device, stream);
}
