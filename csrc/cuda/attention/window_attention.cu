// Attention within windows by tensor cores, sm_80 on: a CTA has 64 or 128 active rows of a window, for one head of an
// image. The window's active rows and keys are listed in shared memory first, so that cost follows them, not the
// window.
#include "cuda/attention/window_attention.cuh"
#ifdef SBNET_SM90
#include "cuda/capability.h"
#include "cuda/sm90/attention/listed.h"
#endif

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
// The base of the exponents moves only when a score passes it by more: weights are below 2^8 otherwise.
constexpr float kSlack = 8.f;

// A tile of 16 * kEach rows a warp. kCosines: scores may be divided by lengths.
template <class T_, int kDim_, int kEach_, Bias kBias_, bool kCosines_>
struct Config {
  using T = T_;
  static constexpr int kDim = kDim_, kEach = kEach_, kRows = 16 * kWarps * kEach;
  static constexpr Bias kBias = kBias_;
  static constexpr bool kTables = kBias == Bias::kTables, kCosines = kCosines_;
  // Scores are products times a number, which is multiplied in where their exponents are made.
  static constexpr bool kPlain = kBias == Bias::kNone && !kCosines;
  static constexpr int kAhead = kPlain && kDim == 64 ? 2 : 1;  // stages under way beside the one in use
  static constexpr bool kStays = kBias == Bias::kHeld;
  static constexpr int kCtas = kEach == 2 || kDim == 128 ? 2 : 4;  // on a multiprocessor
  static constexpr WindowTile kTile = WindowTile::of_halves(kRows, kDim, kAhead + 1);
  static constexpr int kKeyBytes = kKeys * kDim * 2, kStage = 2 * kKeyBytes, kStages = kTile.stages;
  // Numbers of a matrix from a row to the next: eight rows of them lie in different banks.
  static constexpr int kBiasPitch = kKeys + 8, kBiasBytes = kBias == Bias::kHeld ? kRows * kBiasPitch * 2 : 0;
};

// One item. waited: for the launch ahead.
template <class C>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared, uint32_t item, bool& waited) {
  using T = typename C::T;
  constexpr int kDim = C::kDim, kEach = C::kEach, kRows = C::kRows, kWords = kDim / 8, kPass = kThreads / kWords;
  constexpr WindowTile kParts = C::kTile;
  const WindowAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const WindowWork work(a, kRows, item);
  const int window = work.window, head = work.head;
  const int64_t n = work.n;
  int* row_pixels = reinterpret_cast<int*>(shared + kParts.pixels);
  int* row_places = reinterpret_cast<int*>(shared + kParts.places);
  float* row_factors = reinterpret_cast<float*>(shared + kParts.row_factors);
  int* key_pixels = reinterpret_cast<int*>(shared + kParts.key_pixels);  // of the first step of keys
  float* key_factors = reinterpret_cast<float*>(shared + kParts.key_factors);
  int* sums = reinterpret_cast<int*>(shared + kParts.sums);
  uint16_t* list = reinterpret_cast<uint16_t*>(shared + kParts.list);
  float* relative = reinterpret_cast<float*>(shared + kParts.relative(p.keys));
  T* held_bias = reinterpret_cast<T*>(relative);
  const int64_t* key_index = p.key_index + int64_t{window} * p.keys;
  if constexpr (C::kStays) __syncthreads();  // the item before this one has been written
  for (int i = threadIdx.x; i < kRows; i += kThreads) row_pixels[i] = -1, row_places[i] = 0;
  __syncthreads();
  if constexpr (!C::kStays) grid_dependency_wait();
  const int rows = list_rows<kThreads, kRows>(a, work, row_pixels, row_places, sums);
  if (!rows) return;
  int keys = 0;
  if constexpr (C::kStays) {
    keys = list_keys<kThreads, C::kBias>(a, work, list, sums);
    if (static_cast<int>(threadIdx.x) < keys)
      key_pixels[threadIdx.x] = static_cast<int>(pixel_of_key<C::kBias>(a, key_index, list[threadIdx.x]));
    const int64_t matrix = ((p.bias_windows > 1 ? window : 0) * int64_t{p.heads} + head) * p.rows * p.keys;
    hold_bias<kThreads>(static_cast<const T*>(p.bias.data) + matrix, p.keys, row_places, rows, list, keys, held_bias,
                        C::kBiasPitch);
    __syncthreads();
    if (!waited) grid_dependency_wait();
    waited = true;
    grid_dependency_release();
  }
  // Queries, and keys meanwhile.
  const uint32_t memory = shared_address(shared);
  const int word = threadIdx.x % kWords;
  const auto copy = [&](uint32_t to, int row, const T* from) {  // null: zeros
    cp_async_16(to + word_at<kDim>(row, word), from ? from + word * 8 : static_cast<const T*>(p.q.data), from);
  };
  const int64_t q_stride = p.stride(p.q), k_stride = p.stride(p.k), v_stride = p.stride(p.v);
  const T* q = head_of<T>(p.q, n, p.starts[0], head * p.dim);
  const T* k = head_of<T>(p.k, n, p.starts[1], head * p.dim);
  const T* v = head_of<T>(p.v, n, p.starts[2], head * p.value_dim);
#pragma unroll
  for (int row = threadIdx.x / kWords; row < kRows; row += kPass) {
    const int pixel = row_pixels[row];
    copy(memory, row, pixel >= 0 && word * 8 < p.dim ? q + pixel * q_stride : nullptr);
  }
  cp_async_commit();
  if constexpr (!C::kStays) keys = list_keys<kThreads, C::kBias>(a, work, list, sums);
  const T* k_fill = p.k_fill ? static_cast<const T*>(p.k_fill) + head * p.dim : nullptr;
  const T* v_fill = p.v_fill ? static_cast<const T*>(p.v_fill) + head * p.value_dim : nullptr;
  const auto load = [&](int k0, int stage) {
    const uint32_t to = memory + C::kStages + stage * C::kStage;
#pragma unroll
    for (int row = threadIdx.x / kWords; row < kKeys && k0 < keys; row += kPass) {
      const T *from_k = nullptr, *from_v = nullptr;
      if (k0 + row < keys) {
        const int64_t pixel = C::kStays ? key_pixels[row] : pixel_of_key<C::kBias>(a, key_index, list[k0 + row]);
        from_k = pixel >= 0 ? k + pixel * k_stride : k_fill;
        from_v = pixel >= 0 ? v + pixel * v_stride : v_fill;
      }
      copy(to, row, word * 8 < p.dim ? from_k : nullptr);
      copy(to + C::kKeyBytes, row, word * 8 < p.value_dim ? from_v : nullptr);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < C::kAhead; ++i) load(i * kKeys, i);
  cp_async_wait<C::kAhead>();
  __syncthreads();
  const bool cosines = C::kCosines && p.normalize > 0.f;
  if (cosines)
    for (int row = threadIdx.x; row < kRows; row += kThreads)
      row_factors[row] = length_factor<T, kDim>(shared, row, p.dim, p.normalize);
  if constexpr (C::kTables)
    relative_products<T, kThreads>(a, row_places, rows, relative, [&](int row, const T* table) {
      return product_of<T, kDim>(shared, row, table, p.dim) * kLog2e;
    });
  __syncthreads();
  const float factor = p.scale * (p.scales.data ? number<T>(p.scales, head) : 1.f) * kLog2e;
  const int w0 = warp * 16 * kEach;
  const bool works = w0 < rows;
  const auto row_of = [&](int i) { return w0 + i * 8 + lane / 4; };  // of this lane's, 0 ... 2 kEach - 1
  uint32_t queries[kEach][kWords / 2][4];
#pragma unroll
  for (int m = 0; m < kEach; ++m)
#pragma unroll
    for (int d = 0; d < kWords / 2; ++d)
      load_matrix_x4((memory + left_at<kDim>(w0 + m * 16)) ^ (d << 5), queries[m][d]);
  if (C::kPlain &&
      !(factor > 0.f)) {  // the sign, or the 0, goes to the queries: the largest score is of the largest product
#pragma unroll
    for (int m = 0; m < kEach; ++m)
#pragma unroll
      for (int d = 0; d < kWords / 2; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) queries[m][d][i] = factor < 0.f ? queries[m][d][i] ^ 0x80008000u : 0u;
  }
  const float scale = factor == 0.f ? 1.f : fabsf(factor);
  float row_factor[2 * kEach];
  const float* added[2 * kEach];  // products with tables, or (below) a row of the matrix
  int bias_at[2 * kEach];
  const int64_t bias_of_window = ((p.bias_windows > 1 ? window : 0) * int64_t{p.heads} + head) * p.rows * p.keys;
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    row_factor[i] = factor * (cosines ? row_factors[row_of(i)] : 1.f);
    if constexpr (C::kTables)
      added[i] = relative + row_of(i) * WindowTile::relative_stride(p.table_rows, p.table_columns);
    bias_at[i] = row_places[row_of(i)] * p.keys;
  }
  float out[kEach][kWords][4] = {}, base[2 * kEach], total[2 * kEach] = {};
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) base[i] = -3e38f;  // not -inf, which less itself would be NaN
  const auto move_base = [&](int i, float most) {  // of row i of this lane, to the largest over the lanes of the row
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float shrink = exp2_approx(base[i] - most);
    base[i] = most, total[i] *= shrink;
#pragma unroll
    for (int j = 0; j < kWords; ++j) out[i / 2][j][i % 2 * 2] *= shrink, out[i / 2][j][i % 2 * 2 + 1] *= shrink;
  };
  for (int k0 = 0, stage = 0; k0 < keys; k0 += kKeys, stage = stage == C::kAhead ? 0 : stage + 1) {
    cp_async_wait<C::kAhead - 1>();
    __syncthreads();  // and the stage before this one is free
    load(k0 + C::kAhead * kKeys, stage == 0 ? C::kAhead : stage - 1);
    const int tile = C::kStages + stage * C::kStage;
    if (cosines) {
      if (threadIdx.x < kKeys)
        key_factors[threadIdx.x] = length_factor<T, kDim>(shared + tile, threadIdx.x, p.dim, p.normalize);
      __syncthreads();
    }
    if (works) {
      float score[kEach][kKeys / 8][4];
      const uint32_t k_at = memory + tile + columns_at<kDim>();
#pragma unroll
      for (int d = 0; d < kWords / 2; ++d) {
        if (d * 16 >= p.dim) break;
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) {
          uint32_t b[4];
          load_matrix_x4((k_at ^ (d << 5)) + j * 16 * kDim * 2, b);
#pragma unroll
          for (int m = 0; m < kEach; ++m) {
            if (d == 0) {
              Product<T>::set(score[m][2 * j], queries[m][d], b[0], b[1]);
              Product<T>::set(score[m][2 * j + 1], queries[m][d], b[2], b[3]);
            } else {
              Product<T>::add(score[m][2 * j], queries[m][d], b[0], b[1]);
              Product<T>::add(score[m][2 * j + 1], queries[m][d], b[2], b[3]);
            }
          }
        }
      }
      const bool part = k0 + kKeys > keys;
      if constexpr (C::kPlain) {
        if (part) {
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (k0 + j * 8 + lane % 4 * 2 + e % 2 >= keys)
#pragma unroll
                for (int m = 0; m < kEach; ++m) score[m][j][e] = -INFINITY;
        }
        float most[2 * kEach];
        bool grew = false;
#pragma unroll
        for (int i = 0; i < 2 * kEach; ++i) {
          most[i] = -INFINITY;
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j)
            most[i] = fmaxf(most[i], fmaxf(score[i / 2][j][i % 2 * 2], score[i / 2][j][i % 2 * 2 + 1]));
          most[i] *= scale;
          grew |= most[i] > base[i] + kSlack;
        }
        if (__any_sync(~0u, grew)) {
#pragma unroll
          for (int i = 0; i < 2 * kEach; ++i) move_base(i, fmaxf(most[i], base[i]));
        }
      } else {
        float most[2 * kEach];
#pragma unroll
        for (int i = 0; i < 2 * kEach; ++i) most[i] = base[i];
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
          const int at = j * 8 + lane % 4 * 2;
          uint32_t places = 0;  // of two keys; past the last key of any
          if constexpr (C::kBias == Bias::kMatrix || C::kTables)
            if (k0 + at < keys) places = *reinterpret_cast<const uint32_t*>(list + k0 + at);
          Pack<T, 2> numbers[2 * kEach];
          if constexpr (C::kBias == Bias::kHeld)
#pragma unroll
            for (int i = 0; i < 2 * kEach; ++i)
              numbers[i] = *reinterpret_cast<const Pack<T, 2>*>(held_bias + row_of(i) * C::kBiasPitch + at);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int place = !(C::kBias == Bias::kMatrix || C::kTables) || (e && k0 + at + 1 >= keys)
                                  ? 0
                                  : places >> 16 * e & 0xffff;
            const float by = cosines ? key_factors[at + e] : 1.f;
#pragma unroll
            for (int i = 0; i < 2 * kEach; ++i) {
              float& s = score[i / 2][j][i % 2 * 2 + e];
              s *= row_factor[i];
              if (cosines) s *= by;
              if constexpr (C::kBias == Bias::kMatrix)
                s = fmaf(number<T>(p.bias, bias_of_window + bias_at[i] + place), kLog2e, s);
              if constexpr (C::kBias == Bias::kHeld) s = fmaf(to_float(numbers[i].v[e]), kLog2e, s);
              if constexpr (C::kTables) s += added[i][place >> 8] + added[i][p.table_rows + (place & 255)];
              if (part && k0 + at + e >= keys) s = -INFINITY;
              most[i] = fmaxf(most[i], s);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kEach; ++i) move_base(i, most[i]);
      }
      const uint32_t v_at = memory + tile + C::kKeyBytes + left_at<kDim>(0);
#pragma unroll
      for (int c = 0; c < kKeys / 16; ++c) {
        if (k0 + c * 16 >= keys) break;
        uint32_t weights[kEach][4];
#pragma unroll
        for (int m = 0; m < kEach; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float (&s)[4] = score[m][2 * c + i / 2];
            const int r = i % 2, row = 2 * m + r;
            const auto weight = [&](float v) {
              return exp2_approx(C::kPlain ? fmaf(v, scale, -base[row]) : v - base[row]);
            };
            const float left = weight(s[2 * r]), right = weight(s[2 * r + 1]);
            total[row] += left + right;
            weights[m][i] = pair<T>(left, right);
          }
#pragma unroll
        for (int d = 0; d < kWords / 2; ++d) {
          if (d * 16 >= p.value_dim) break;
          uint32_t b[4];
          load_matrix_x4_transposed((v_at ^ (d << 5)) + c * 16 * kDim * 2, b);
#pragma unroll
          for (int m = 0; m < kEach; ++m) {
            Product<T>::add(out[m][2 * d], weights[m], b[0], b[1]);
            Product<T>::add(out[m][2 * d + 1], weights[m], b[2], b[3]);
          }
        }
      }
    }
  }
  cp_async_wait<0>();
  const int64_t out_stride = p.stride(p.out);
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    total[i] += __shfl_xor_sync(~0u, total[i], 1);
    total[i] += __shfl_xor_sync(~0u, total[i], 2);
    const int pixel = row_pixels[row_of(i)];
    if (pixel < 0) continue;
    const float by = total[i] != 0.f ? 1.f / total[i] : 0.f;
    T* to = static_cast<T*>(p.out.data) + n * p.out.stride[0] + pixel * out_stride + head * p.value_dim + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const float (&o)[4] = out[i / 2][j];
      if (j * 8 < p.value_dim)
        *reinterpret_cast<uint32_t*>(to + j * 8) = pair<T>(o[i % 2 * 2] * by, o[i % 2 * 2 + 1] * by);
    }
  }
}

// Where small windows are many CTAs stay, as most may have no active row: each asks of all of its items at once which
// have.
template <class C>
__global__ void __launch_bounds__(kThreads, C::kCtas) window_attention_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  bool waited = !a.settled;
  if constexpr (!C::kStays) return attend<C>(a, shared, blockIdx.x, waited);
  if (waited) grid_dependency_wait();
  const uint32_t step = gridDim.x;
  for (uint32_t first = blockIdx.x; first < a.items; first += 32 * step) {
    uint32_t left = active_items<kThreads>(a, first, reinterpret_cast<uint32_t*>(shared + C::kTile.key_pixels));
    for (uint32_t item = first; left && item < a.items; item += step, left >>= 1)
      if (left & 1) attend<C>(a, shared, item, waited);
    __syncthreads();  // bits have been read
  }
  if (!waited && blockIdx.x == 0) grid_dependency_wait();  // the end of this launch says that those before have ended
}

template <class C>
Status launch(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return launch_windows<kThreads, window_attention_kernel<C>>(p, C::kTile, device, stream, C::kBiasBytes,
                                                              C::kStays ? C::kCtas : 0);
}

// Two operands of rows a warp use each fragment of keys twice, where rows are enough for all multiprocessors.
template <class T, Bias kBias, bool kCosines>
Status launch_of(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.dim > 64 || p.value_dim > 64) return launch<Config<T, 128, 1, kBias, kCosines>>(p, device, stream);
  if constexpr (kBias == Bias::kNone && !kCosines)
    if (p.rows >= 256 && size_product({(p.rows + 127) / 128, p.windows, p.heads, p.q.size[0]}) >= 2 * device.sm_count)
      return launch<Config<T, 64, 2, kBias, kCosines>>(p, device, stream);
  if constexpr (kBias == Bias::kHeld)
    if (p.dim <= 32 && p.value_dim <= 32) return launch<Config<T, 32, 1, kBias, kCosines>>(p, device, stream);
  return launch<Config<T, 64, 1, kBias, kCosines>>(p, device, stream);
}

template <class T, Bias kBias>
Status launch_with(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.normalize > 0.f ? launch_of<T, kBias, true>(p, device, stream)
                           : launch_of<T, kBias, false>(p, device, stream);
}

template <class T>
Status launch_with(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.row_table) return launch_of<T, Bias::kTables, true>(p, device, stream);
  if (!p.bias.data) return launch_with<T, Bias::kNone>(p, device, stream);
  // Fewer items take longer than CTAs that come and go (docs/log/tokens.md).
  const bool many = size_product({p.windows, p.heads, p.q.size[0]}) >= 16 * device.sm_count;
  const bool fits = p.keys <= kKeys && p.rows <= kKeys && !p.listed_rows.order && p.bias.dtype == p.q.dtype;
  return many && fits ? launch_with<T, Bias::kHeld>(p, device, stream)
                      : launch_with<T, Bias::kMatrix>(p, device, stream);
}

}  // namespace
}  // namespace sbnet::portable

sbnet::Status sbnet_window_attention_cuda(const sbnet::WindowAttentionParams* p, void* stream_handle) {
  using namespace sbnet;
  using namespace sbnet::portable;
  SBNET_TRY(validate_on_cuda(*p));
  if (!p->q.size[0] || !p->windows || !p->rows) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kWindowOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
#ifdef SBNET_SM90
  if (select_capability(device) == 90 && sm90::listed_attention_takes(*p))
    return sm90::listed_attention(*p, device, stream);
#endif
  if (p->q.dtype == DType::kF32) return launch_window_attention_simt(*p, device, stream);
  return p->q.dtype == DType::kF16 ? launch_with<__half>(*p, device, stream)
                                   : launch_with<__nv_bfloat16>(*p, device, stream);
}
