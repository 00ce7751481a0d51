// Gradients of block-sparse attention of float16 and bfloat16 by tensor cores, for heads of up to 128 features, in two
// passes of one kernel: dQ by tiles of queries; dK and dV by tiles of keys, the query heads of a group one after the
// other. The side that stays is the left operand, so that weights and gradients of scores go from registers to
// registers. Nothing is added atomically.
#include "cuda/attention/backward.cuh"

namespace sbnet::portable {
namespace {

// kMet: of a stage; kRegisters: what stays is kept in registers.
template <class T_, bool kOfKeys_, int kDim_, int kWarps_, int kMet_, bool kRegisters_, int kCtas_>
struct Backward {
  using T = T_;
  static constexpr bool kOfKeys = kOfKeys_, kRegisters = kRegisters_;
  static constexpr int kDim = kDim_, kWarps = kWarps_, kMet = kMet_, kPart = 32, kCtas = kCtas_;
  static constexpr int kThreads = kWarps * 32, kRows = kWarps * kWarpRows, kOwnBytes = kRows * kDim * 2;
  static constexpr int kMetBytes = kMet * kDim * 2, kNumbers = kOfKeys ? kMet * kRowNumbers : 0;
  static constexpr int kStage = 2 * kMetBytes + (kNumbers + 1023) / 1024 * 1024, kStepsAt = 2 * kOwnBytes + 2 * kStage;
  static constexpr int kBytes = kStepsAt + kStepBytes;
  static_assert(kBytes <= 99 * 1024 && kMet % kPart == 0 && (!kOfKeys || kMet == kPart));
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) attention_grad_kernel(const __grid_constant__ GradArgs a) {
  using T = typename C::T;
  constexpr int kDim = C::kDim, kPart = C::kPart;
  constexpr bool kOfKeys = C::kOfKeys;
  extern __shared__ __align__(1024) uint8_t shared[];
  const AttentionParams& p = a.p.forward;
  grid_dependency_wait();
  const uint32_t memory = shared_address(shared), stages = memory + 2 * C::kOwnBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int length = kOfKeys ? p.phase_k_length() : p.phase_q_length(), group = kOfKeys ? p.heads / p.kv_heads : 1;
  const AttentionWork work(p, length, kOfKeys ? p.kv_heads : p.heads, C::kRows, !kOfKeys);
  AttentionSequence s(p, work.b, work.head * group, work.phase);
  const int first_head = s.h, own_end = kOfKeys ? s.k_length : s.q_length, met_end = kOfKeys ? s.q_length : s.k_length;
  {
    const AttentionTensor &one = kOfKeys ? p.k : p.q, &two = kOfKeys ? p.v : a.p.grad_out;
    TileCopy<kDim, C::kRows, C::kThreads>(s.at<T>(one, work.head, work.first), one.stride * s.phases, p.head_dim)(
        memory, 0, own_end - work.first);
    TileCopy<kDim, C::kRows, C::kThreads>(s.at<T>(two, work.head, work.first), two.stride * s.phases, p.head_dim)(
        memory + C::kOwnBytes, 0, own_end - work.first);
  }
  const AttentionTensor &one = kOfKeys ? p.q : p.k, &two = kOfKeys ? a.p.grad_out : p.v;
  const int met_head = kOfKeys ? first_head : s.kv_h;
  TileCopy<kDim, C::kMet, C::kThreads> copy_one(s.at<T>(one, met_head, 0), one.stride * s.phases, p.head_dim);
  TileCopy<kDim, C::kMet, C::kThreads> copy_two(s.at<T>(two, met_head, 0), two.stride * s.phases, p.head_dim);
  const int64_t numbers_at = a.row(s);
  [[maybe_unused]] NumberCopy<C::kMet> copy_numbers(a, numbers_at);
  [[maybe_unused]] int copied_head = first_head;
  const auto load = [&](int step, int head, uint32_t to) {
    if (step != kNoStep) {
      const int at = step & ~1;
      if constexpr (kOfKeys) {
        if (head != copied_head) {
          const int64_t heads = head - copied_head;
          copy_one.from += 2 * heads * one.head_stride, copy_two.from += 2 * heads * two.head_stride;
          copy_numbers.from += heads * s.phases * a.padded * copy_numbers.bytes;
          copied_head = head;
        }
        copy_numbers(at, to + 2 * C::kMetBytes);
      }
      copy_one(to, at, met_end - at);
      copy_two(to + C::kMetBytes, at, met_end - at);
    }
    cp_async_commit();
  };
  Steps<C::kRows, C::kMet, kOfKeys, C::kWarps> steps(p, s, work.first, first_head + group, shared + C::kStepsAt);
  // This one and the next. Rolled up, the loop makes operands of dQ move about: 143 instructions a stage more.
  int step[2] = {}, head[2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    step[0] = step[1], head[0] = head[1];
    step[1] = steps.next(), head[1] = steps.head();
    if (n == 0) load(step[1], head[1], stages);
  }
  const int w0 = warp * kWarpRows, first_row = work.first + w0;
  const uint32_t own_at = memory + left_at<kDim>(w0);
  uint32_t own[2][2][C::kRegisters ? kDim / 16 : 1][4];
  if constexpr (C::kRegisters) {
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d)
          load_matrix_x4((own_at ^ (d << 5)) + w * C::kOwnBytes + m * 16 * kDim * 2, own[w][m][d]);
  }
  float lse2[4], start[4];  // of this lane's queries
  if constexpr (!kOfKeys) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t q = numbers_at + first_row + i * 8 + lane / 4;
      lse2[i] = a.lse2[q], start[i] = a.start[q / 2 * 4 + q % 2];
    }
  }
  float first[2][kDim / 8][4] = {}, second[2][kOfKeys ? kDim / 8 : 1][4] = {};
  const float scale = p.scale * kLog2e;
  const uint32_t column_lane = columns_at<kDim>(), sum_lane = left_at<kDim>(0);
  // kPart positions of the other side. A template, so that where every pair is seen and
  // kept it is straight code.
  const auto meet = [&](auto masked, PairBits bits, uint32_t one_at, uint32_t two_at, const uint8_t* numbers) {
    constexpr bool kMasked = decltype(masked)::value;
    float score[2][4][4], grad[2][4][4];
    const auto product = [&](int w, uint32_t base, float (&to)[2][4][4], int d) {
      uint32_t left[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if constexpr (C::kRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) left[m][i] = own[w][m][d][i];
        } else {
          load_matrix_x4((own_at ^ (d << 5)) + w * C::kOwnBytes + m * 16 * kDim * 2, left[m]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t b[4];
        load_matrix_x4(((base + column_lane) ^ (d << 5)) + j * 16 * kDim * 2, b);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (d == 0 && w == 0)
            Product<T>::set(to[m][2 * j], left[m], b[0], b[1]), Product<T>::set(to[m][2 * j + 1], left[m], b[2], b[3]);
          else
            Product<T>::add(to[m][2 * j], left[m], b[0], b[1]), Product<T>::add(to[m][2 * j + 1], left[m], b[2], b[3]);
        }
      }
    };
    const auto starts = [&](int m, int j) {  // of this lane's columns and rows
      if constexpr (kOfKeys)
        return starts_at(numbers, j * 8 + lane % 4 * 2);
      else
        return make_float4(start[2 * m], start[2 * m], start[2 * m + 1], start[2 * m + 1]);
    };
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) product(0, one_at, score, d);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float4 v = starts(m, j);
        grad[m][j][0] = v.x, grad[m][j][1] = v.y, grad[m][j][2] = v.z, grad[m][j][3] = v.w;
      }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) product(1, two_at, grad, d);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 l;
      if constexpr (kOfKeys) l = lse2_at<C::kMet>(numbers, j * 8 + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float log = kOfKeys ? (e % 2 ? l.y : l.x) : lse2[m * 2 + e / 2];
          score[m][j][e] = exp2_approx(fmaf(score[m][j][e], scale, -log));
        }
    }
    if constexpr (kMasked) {
      for_bits<kOfKeys>(bits.seen,
                        [&](int m, int j, int e, bool seen) { score[m][j][e] = seen ? score[m][j][e] : 0.f; });
      if (p.dropout.p > 0.f)
        for_bits<kOfKeys>(bits.kept, [&](int m, int j, int e, bool kept) {
          const float4 v = starts(m, j);
          grad[m][j][e] = kept ? grad[m][j][e] : e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
        });
    }
    const auto add = [&](const float (&x)[2][4][4], uint32_t base, float (&to)[2][kDim / 8][4]) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t left[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            left[m][i] = pair<T>(x[m][2 * k + i / 2][i % 2 * 2], x[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t b[4];
          load_matrix_x4_transposed(((base + sum_lane) ^ (d << 5)) + k * 16 * kDim * 2, b);
#pragma unroll
          for (int m = 0; m < 2; ++m)
            Product<T>::add(to[m][2 * d], left[m], b[0], b[1]), Product<T>::add(to[m][2 * d + 1], left[m], b[2], b[3]);
        }
      }
    };
    const auto multiply = [&] {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) grad[m][j][e] *= score[m][j][e];
    };
    if constexpr (kMasked) {
      multiply();
      if (kOfKeys && p.dropout.p > 0.f)
        for_bits<kOfKeys>(bits.kept,
                          [&](int m, int j, int e, bool kept) { score[m][j][e] = kept ? score[m][j][e] : 0.f; });
    }
    if constexpr (kOfKeys) add(score, two_at, second);
    if constexpr (!kMasked) multiply();
    add(grad, one_at, first);
  };
  uint32_t slot = 0;
  while (step[0] != kNoStep) {
    cp_async_wait<0>();
    __syncthreads();
    load(step[1], head[1], stages + (slot ^ 1) * C::kStage);
    const uint32_t stage = stages + slot * C::kStage;
    const uint8_t* numbers = shared + 2 * C::kOwnBytes + slot * C::kStage + 2 * C::kMetBytes;
    if (step[0] & 1) {
#pragma unroll
      for (int row = 0; row < C::kMet; row += kPart)
        meet(std::false_type(), {}, stage + row * kDim * 2, stage + C::kMetBytes + row * kDim * 2, numbers + row * 8);
    } else {
#pragma unroll 1
      for (int row = 0; row < C::kMet; row += kPart) {
        const int at = step[0] + row;
        PairBits bits;
        if constexpr (kOfKeys) {
          const AttentionSequence of(p, work.b, head[0], work.phase);
          bits = pair_bits(p, of, at + lane, first_row);
        } else {
          bits = pair_bits(p, s, first_row + lane, at);
        }
        if (__any_sync(~0u, bits.seen != 0))
          meet(std::true_type(), bits, stage + row * kDim * 2, stage + C::kMetBytes + row * kDim * 2,
               numbers + row * 8);
      }
    }
    step[0] = step[1], head[0] = head[1];
    step[1] = steps.next(), head[1] = steps.head();
    slot ^= 1;
  }
  cp_async_wait<0>();
  __syncthreads();
  const int rows = length - first_row, used = own_end - first_row - lane / 4;
  const float keep = a.keep();
  uint8_t* mine = shared + w0 * kDim * 2;
  const auto store = [&](const float (&sums)[2][kDim / 8][4], float factor, const AttentionTensor& to) {
    store_rows<T, kDim>(
        sums, [&](int i) { return i * 8 < used ? factor : 0.f; }, mine, s.at<T>(to, work.head, first_row),
        to.stride * s.phases, rows, p.head_dim / 8);
  };
  store(first, p.scale * keep, kOfKeys ? a.p.grad_k : a.p.grad_q);
  if constexpr (kOfKeys) store(second, keep, a.p.grad_v);
}

constexpr int kPrepareThreads = 256, kPrepareLanes = 8;

// The numbers of each query, kPrepareLanes lanes for one.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads) attention_prepare_kernel(const GradArgs a) {
  grid_dependency_wait();
  const AttentionParams& p = a.p.forward;
  const int64_t r = (int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x) / kPrepareLanes;
  const int64_t plane = r / a.padded;
  const int i = static_cast<int>(r % a.padded), lane = threadIdx.x % kPrepareLanes, phases = p.layout.rule.phases;
  const bool there = plane < p.batch * p.heads * phases;
  const int64_t sequence = there ? plane : 0;
  const AttentionSequence s(p, sequence / phases / p.heads, static_cast<int>(sequence / phases % p.heads),
                            static_cast<int>(sequence % phases));
  const bool real = there && i < s.q_length;
  float sum = 0.f;
  if (real) {
    const T *grad = s.at<T>(a.p.grad_out, s.h, i), *out = s.at<T>(p.out, s.h, i);
    for (int d = lane * 8; d < p.head_dim; d += kPrepareLanes * 8) {
      const auto x = *reinterpret_cast<const Pack<T, 8>*>(grad + d);
      const auto y = *reinterpret_cast<const Pack<T, 8>*>(out + d);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(to_float(x.v[e]), to_float(y.v[e]), sum);
    }
  }
#pragma unroll
  for (int lanes = kPrepareLanes / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (!there || lane) return;
  const float lse = real ? p.lse[s.row(p, i)] : -INFINITY;
  if (real && a.p.grad_lse) sum -= a.p.grad_lse[s.row(p, i)];
  a.lse2[r] = lse == -INFINITY ? INFINITY : lse * kLog2e;
  float* start = a.start + r / 2 * 4 + r % 2;
  start[0] = start[2] = -sum / a.keep();
}

template <class T>
Status launch_prepare(const GradArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const AttentionParams& p = a.p.forward;
  const int64_t rows = p.batch * p.heads * p.layout.rule.phases * a.padded;
  const int64_t ctas = (rows * kPrepareLanes + kPrepareThreads - 1) / kPrepareThreads;
  SBNET_CHECK(ctas <= INT32_MAX, "%s: q: expected fewer than 2^36 queries", kAttentionBackwardOp);
  if (!ctas) return ok_status();
  SBNET_CUDA_TRY(kAttentionBackwardOp,
                 launch_dependent(device, attention_prepare_kernel<T>, dim3(static_cast<unsigned>(ctas)),
                                  dim3(kPrepareThreads), 0, stream, a));
  return ok_status();
}

template <class C>
Status launch_pass(const GradArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = attention_grad_kernel<C>;
  const AttentionParams& p = a.p.forward;
  const int32_t length = C::kOfKeys ? p.phase_k_length() : p.phase_q_length();
  if (!length) return ok_status();
  dim3 grid;
  SBNET_TRY(attention_grid(kAttentionBackwardOp, p, length, C::kOfKeys ? p.kv_heads : p.heads, 1, &grid, C::kRows));
  SBNET_TRY(allow_shared<kernel>(kAttentionBackwardOp, device, C::kBytes));
  SBNET_CUDA_TRY(kAttentionBackwardOp, launch_dependent(device, kernel, grid, dim3(C::kThreads), C::kBytes, stream, a));
  return ok_status();
}

template <class T>
Status launch_of(const GradArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const AttentionParams& p = a.p.forward;
  SBNET_TRY(launch_prepare<T>(a, device, stream));
  if (p.head_dim <= 64) {
    SBNET_TRY((launch_pass<Backward<T, false, 64, 2, 64, true, 4>>(a, device, stream)));
    return launch_pass<Backward<T, true, 64, 2, 32, false, 4>>(a, device, stream);
  }
  if (p.layout.rows && p.layout.block < 128)
    SBNET_TRY((launch_pass<Backward<T, false, 128, 2, 32, false, 3>>(a, device, stream)));
  else
    SBNET_TRY((launch_pass<Backward<T, false, 128, 4, 32, false, 2>>(a, device, stream)));
  return launch_pairs<T>(a, device, stream);
}

int32_t padded_queries(const AttentionParams& p) { return (p.phase_q_length() + 127) / 128 * 128; }

}  // namespace

int64_t attention_backward_mma_bytes(const AttentionParams& p) {
  return p.batch * p.heads * p.layout.rule.phases * padded_queries(p) * kRowNumbers;
}

Status launch_attention_backward_mma(const AttentionBackwardParams& b, void* workspace, const DeviceInfo& device,
                                     cudaStream_t stream) {
  const AttentionParams& p = b.forward;
  GradArgs a = {b, static_cast<float*>(workspace), nullptr, padded_queries(p)};
  a.start = a.lse2 + p.batch * p.heads * p.layout.rule.phases * a.padded;
  return p.dtype == DType::kF16 ? launch_of<__half>(a, device, stream) : launch_of<__nv_bfloat16>(a, device, stream);
}

}  // namespace sbnet::portable
