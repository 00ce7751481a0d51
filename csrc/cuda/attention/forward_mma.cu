// Block-sparse attention of float16 and bfloat16 by tensor cores, sm_80 on, for heads of up to 128 features. Scores and
// sums are float32, weights are rounded for the second product. Where every pair of a step is visible, a step is
// straight code without a test.
#include "cuda/attention/tiles.cuh"

namespace sbnet::portable {
namespace {

// kKeys: of a stage; kPart: of a step with a mask; kStages of keys and values are in shared memory at a time. Queries
// stay in registers, or in shared memory where registers are short. kCtas fit a multiprocessor that has the memory.
template <class T_, int kDim_, int kWarps_, int kKeys_, int kPart_, int kStages_, bool kRegisters_, int kCtas_>
struct Forward {
  using T = T_;
  static constexpr int kDim = kDim_, kWarps = kWarps_, kKeys = kKeys_, kPart = kPart_, kStages = kStages_;
  static constexpr bool kRegisters = kRegisters_;
  static constexpr int kCtas = kCtas_, kThreads = kWarps * 32, kRows = kWarps * kWarpRows;
  static constexpr int kBytesOfKeys = kKeys * kDim * 2, kStage = 2 * kBytesOfKeys, kBytesOfQueries = kRows * kDim * 2;
  // Queries that go to registers lie where the last stage is, which is filled later.
  static constexpr int kQueriesAt = (kRegisters ? kStages - 1 : kStages) * kStage;
  static constexpr int kStepsAt = kQueriesAt + (kRegisters && kStage > kBytesOfQueries ? kStage : kBytesOfQueries);
  static constexpr int kBytes = kStepsAt + kStepBytes;
  static_assert(kBytes <= 99 * 1024 && kPart % 32 == 0 && kKeys % kPart == 0 && kKeys <= kTile);
};

// Exponents start from here: a score that is not seen, -inf, is 0 without a test.
constexpr float kLowest = -3e38f;
// The base of the exponents moves only when a score passes it by more: weights are below 2^8 otherwise.
constexpr float kSlack = 8.f;

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    attention_mma_kernel(const __grid_constant__ AttentionParams p) {
  using T = typename C::T;
  constexpr int kDim = C::kDim, kStages = C::kStages, kPart = C::kPart;
  extern __shared__ __align__(1024) uint8_t shared[];
  grid_dependency_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const AttentionWork work(p, p.phase_q_length(), p.heads, C::kRows, true);
  const AttentionSequence s(p, work.b, work.head, work.phase);
  const uint32_t memory = shared_address(shared);
  const int64_t k_stride = p.k.stride * s.phases, v_stride = p.v.stride * s.phases;
  const TileCopy<kDim, C::kKeys, C::kThreads> copy_k(s.at<T>(p.k, s.kv_h, 0), k_stride, p.head_dim);
  const TileCopy<kDim, C::kKeys, C::kThreads> copy_v(s.at<T>(p.v, s.kv_h, 0), v_stride, p.head_dim);
  const auto load = [&](int step, uint32_t to) {
    if (step != kNoStep) {
      const int k0 = step & ~1;
      copy_k(to, k0, s.k_length - k0);
      copy_v(to + C::kBytesOfKeys, k0, s.k_length - k0);
    }
    cp_async_commit();
  };
  TileCopy<kDim, C::kRows, C::kThreads>(s.at<T>(p.q, s.h, work.first), p.q.stride * s.phases, p.head_dim)(
      memory + C::kQueriesAt, 0, s.q_length - work.first);
  cp_async_commit();
  Steps<C::kRows, C::kKeys, false, C::kWarps> steps(p, s, work.first, s.h + 1, shared + C::kStepsAt);
  int step[kStages] = {};  // this one and the next
#pragma unroll 1
  for (int n = 0; n < kStages; ++n) {
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) step[i] = step[i + 1];
    step[kStages - 1] = steps.next();
    if (n + 1 < kStages) load(step[kStages - 1], memory + n * C::kStage);
  }
  if (!(p.scale > 0.f)) {  // the sign, or the 0, goes to the queries: the largest score is that of the largest product
    cp_async_wait<0>();
    __syncthreads();
    T* queries = reinterpret_cast<T*>(shared + C::kQueriesAt);
    for (int i = threadIdx.x; i < C::kRows * kDim; i += C::kThreads)
      queries[i] = from_float<T>(to_float(queries[i]) * (p.scale < 0.f ? -1.f : 0.f));
    __syncthreads();
  }
  const float scale = (p.scale == 0.f ? 1.f : fabsf(p.scale)) * kLog2e;
  const int w0 = warp * kWarpRows, first_row = work.first + w0;
  const uint32_t q_at = memory + C::kQueriesAt + left_at<kDim>(w0);
  uint32_t queries[2][C::kRegisters ? kDim / 16 : 1][4];
  if constexpr (C::kRegisters) {
    cp_async_wait<kStages - 1>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) load_matrix_x4((q_at + m * 16 * kDim * 2) ^ (d << 5), queries[m][d]);
  }
  float out[2][kDim / 8][4] = {}, base[2][2], total[2][2] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) base[m][0] = base[m][1] = kLowest;
  const uint32_t k_lane = columns_at<kDim>(), v_lane = left_at<kDim>(0) + C::kBytesOfKeys;
  const auto move_base = [&](const float (&most)[2][2]) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float v = most[m][r];
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 2)) * scale;
        v = fmaxf(v, base[m][r]);
        const float shrink = exp2_approx(base[m][r] - v);
        base[m][r] = v;
        total[m][r] *= shrink;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) out[m][j][2 * r] *= shrink, out[m][j][2 * r + 1] *= shrink;
      }
  };
  // kKeys keys whose rows are at k_at and v_at. kMasked: bits of this lane's row, which pairs are seen, and kept.
  const auto meet = [&](auto width, auto masked, uint32_t k_at, uint32_t v_at, const uint32_t* seen,
                        const uint32_t* kept) {
    constexpr int kColumns = decltype(width)::value / 8;
    constexpr bool kMasked = decltype(masked)::value;
    float score[2][kColumns][4];
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if constexpr (C::kRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = queries[m][d][i];
        } else {
          load_matrix_x4((q_at ^ (d << 5)) + m * 16 * kDim * 2, a[m]);
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        uint32_t b[4];
        load_matrix_x4((k_at ^ (d << 5)) + j * 16 * kDim * 2, b);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (d == 0)
            Product<T>::set(score[m][2 * j], a[m], b[0], b[1]), Product<T>::set(score[m][2 * j + 1], a[m], b[2], b[3]);
          else
            Product<T>::add(score[m][2 * j], a[m], b[0], b[1]), Product<T>::add(score[m][2 * j + 1], a[m], b[2], b[3]);
        }
      }
    }
    // This lane's columns of row r of operand m.
    const auto row_bits = [&](const uint32_t* words, int m, int r, int word) {
      return __shfl_sync(~0u, words[word], m * 16 + r * 8 + lane / 4) >> lane % 4 * 2;
    };
    if constexpr (kMasked) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int word = 0; word < kColumns / 4; ++word) {
            const uint32_t bits = row_bits(seen, m, r, word);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              float& v = score[m][word * 4 + e / 2][2 * r + e % 2];
              v = bits & 1u << (e / 2 * 8 + e % 2) ? v : -INFINITY;
            }
          }
    }
    float most[2][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float v = fmaxf(score[m][0][2 * r], score[m][0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kColumns; ++j) v = fmaxf(v, fmaxf(score[m][j][2 * r], score[m][j][2 * r + 1]));
        most[m][r] = v;
        grew |= v * scale > base[m][r] + kSlack;
      }
    if (__any_sync(~0u, grew)) move_base(most);
#pragma unroll
    for (int k = 0; k < kColumns / 2; ++k) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&v)[4] = score[m][2 * k + i / 2];
          const int r = i % 2;
          const float x = exp2_approx(fmaf(v[2 * r], scale, -base[m][r]));
          const float y = exp2_approx(fmaf(v[2 * r + 1], scale, -base[m][r]));
          total[m][r] += x + y;
          a[m][i] = pair<T>(x, y);
        }
      if constexpr (kMasked) {
        if (p.dropout.p > 0.f) {
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const uint32_t bits = row_bits(kept, m, r, k / 2) >> k % 2 * 16;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                uint32_t& weights = a[m][r + 2 * i];
                weights &= (bits & 1u << i * 8 ? 0xffffu : 0u) | (bits & 2u << i * 8 ? 0xffff0000u : 0u);
              }
            }
        }
      }
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t b[4];
        load_matrix_x4_transposed((v_at ^ (d << 5)) + k * 16 * kDim * 2, b);
#pragma unroll
        for (int m = 0; m < 2; ++m)
          Product<T>::add(out[m][2 * d], a[m], b[0], b[1]), Product<T>::add(out[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  };
  uint32_t slot = memory, free_slot = memory + (kStages - 1) * C::kStage;
  while (step[0] != kNoStep) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    load(step[kStages - 1], free_slot);
    const uint32_t k_at = slot + k_lane, v_at = slot + v_lane;
    const int k0 = step[0] & ~1;
    uint64_t seen = ~uint64_t{0};
    bool whole = step[0] & 1;
    if (!whole) {
      const int q = first_row + lane;
      seen = q < s.q_length ? visible_keys(p.layout, s.plane, s.h, q, k0 / kTile * kTile, s.k_length) >> k0 % kTile : 0;
      if constexpr (C::kKeys == kTile) whole = p.dropout.p == 0.f && __all_sync(~0u, seen == ~uint64_t{0});
    }
    if (whole) {
      meet(std::integral_constant<int, C::kKeys>(), std::false_type(), k_at, v_at, nullptr, nullptr);
    } else {
#pragma unroll 1
      for (int part = 0; part < C::kKeys; part += kPart, seen >>= kPart % 64) {
        const uint64_t mine = kPart == 64 ? seen : seen & ((uint64_t{1} << kPart % 64) - 1);
        if (!__any_sync(~0u, mine != 0)) continue;
        uint32_t bits[kPart / 32], kept[kPart / 32] = {};
#pragma unroll
        for (int w = 0; w < kPart / 32; ++w) bits[w] = static_cast<uint32_t>(mine >> w * 32);
        if (p.dropout.p > 0.f) {
          const Dropout dropout(p);
#pragma unroll
          for (int i = 0; i < kPart / 8; ++i)
            kept[i / 4] |= dropout.kept(s.dropout_plane, first_row + lane, (k0 + part) / 8 + i) << i % 4 * 8;
        }
        const uint32_t at = part * kDim * 2;
        meet(std::integral_constant<int, kPart>(), std::true_type(), k_at + at, v_at + at, bits, kept);
      }
    }
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) step[i] = step[i + 1];
    step[kStages - 1] = steps.next();
    free_slot = slot;
    slot = slot == memory + (kStages - 1) * C::kStage ? memory : slot + C::kStage;
  }
  cp_async_wait<0>();
  __syncthreads();
  const int rows = p.phase_q_length() - first_row;
  const float keep = p.dropout.p > 0.f ? 1.f / (1.f - p.dropout.p) : 1.f;
  float factor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = total[i / 2][i % 2];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int r = i * 8 + lane / 4;
    const bool some = sum != 0.f && first_row + r < s.q_length;
    factor[i] = some ? keep / sum : 0.f;
    if (lane % 4 == 0 && p.lse && r < rows)
      p.lse[s.row(p, first_row + r)] = some ? (base[i / 2][i % 2] + log2f(sum)) * kLn2 : -INFINITY;
  }
  store_rows<T, kDim>(
      out, [&](int i) { return factor[i]; }, shared + w0 * kDim * 2, s.at<T>(p.out, s.h, first_row),
      p.out.stride * s.phases, rows, p.head_dim / 8);
}

template <class C>
Status launch(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = attention_mma_kernel<C>;
  dim3 grid;
  SBNET_TRY(attention_grid(kAttentionOp, p, p.phase_q_length(), p.heads, 1, &grid, C::kRows));
  SBNET_TRY(allow_shared<kernel>(kAttentionOp, device, C::kBytes));
  SBNET_CUDA_TRY(kAttentionOp, launch_dependent(device, kernel, grid, dim3(C::kThreads), C::kBytes, stream, p));
  return ok_status();
}

// Tiles of 64 queries where lists of blocks are that fine: the union of two lists would be longer.
template <class T>
Status launch_of(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch<Forward<T, 64, 2, 64, 32, 3, true, 4>>(p, device, stream);
  if (p.layout.rows && p.layout.block < 128) return launch<Forward<T, 128, 2, 32, 32, 2, false, 4>>(p, device, stream);
  return launch<Forward<T, 128, 4, 64, 64, 2, false, 2>>(p, device, stream);
}

}  // namespace

Status launch_attention_mma(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.dtype == DType::kF16 ? launch_of<__half>(p, device, stream) : launch_of<__nv_bfloat16>(p, device, stream);
}

}  // namespace sbnet::portable
