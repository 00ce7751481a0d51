// dK and dV of heads of 72 to 128 features. A warp that keeps 32 keys of both has no room for its sums: here two warps
// share 32 keys. Each computes the weights of half of the queries, they exchange them through shared memory, and each
// sums half of the features.
#include "cuda/attention/backward.cuh"

namespace sbnet::portable {
namespace {

constexpr int kDim = 128, kRows = 64, kThreads = 128, kTileBytes = kRows * kDim * 2, kWeightBytes = 64 * 64 * 2;
// Keys, values, two tiles of queries, one of dO; weights and gradients of scores; the numbers of two tiles of queries.
constexpr int kQueriesAt = 2 * kTileBytes, kGradsAt = 4 * kTileBytes, kWeightsAt = 5 * kTileBytes;
constexpr int kNumbersAt = 6 * kTileBytes, kNumberBytes = kRows * kRowNumbers, kStepsAt = kNumbersAt + 2 * kNumberBytes;
constexpr int kBytes = kStepsAt + kStepBytes;
static_assert(kBytes <= 99 * 1024 && 2 * kWeightBytes <= kTileBytes);

template <class T>
__global__ void __launch_bounds__(kThreads, 2) attention_grad_pairs_kernel(const __grid_constant__ GradArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const AttentionParams& p = a.p.forward;
  grid_dependency_wait();
  const uint32_t memory = shared_address(shared);
  const int lane = threadIdx.x % 32, own = threadIdx.x / 64 * 32, half = threadIdx.x / 32 % 2;
  const int group = p.heads / p.kv_heads;
  const AttentionWork work(p, p.phase_k_length(), p.kv_heads, kRows, false);
  const AttentionSequence s(p, work.b, work.head * group, work.phase);
  const int first_head = s.h, used = s.k_length - work.first;
  using Copy = TileCopy<kDim, kRows, kThreads>;
  Copy(s.at<T>(p.k, work.head, work.first), p.k.stride * s.phases, p.head_dim)(memory, 0, used);
  Copy(s.at<T>(p.v, work.head, work.first), p.v.stride * s.phases, p.head_dim)(memory + kTileBytes, 0, used);
  const AttentionTensor& dout = a.p.grad_out;
  Copy copy_q(s.at<T>(p.q, first_head, 0), p.q.stride * s.phases, p.head_dim);
  Copy copy_grad(s.at<T>(dout, first_head, 0), dout.stride * s.phases, p.head_dim);
  NumberCopy<kRows> copy_numbers(a, a.row(s));
  int head_of_q = first_head, head_of_grad = first_head;
  const auto load_queries = [&](int step, int head, int slot) {
    if (step != kNoStep) {
      const int q = step & ~1;
      if (head != head_of_q) {
        const int64_t heads = head - head_of_q;
        copy_q.from += 2 * heads * p.q.head_stride;
        copy_numbers.from += heads * s.phases * a.padded * copy_numbers.bytes;
        head_of_q = head;
      }
      copy_q(memory + kQueriesAt + slot * kTileBytes, q, s.q_length - q);
      copy_numbers(q, memory + kNumbersAt + slot * kNumberBytes);
    }
    cp_async_commit();
  };
  const auto load_grads = [&](int step, int head) {
    if (step != kNoStep) {
      const int q = step & ~1;
      if (head != head_of_grad)
        copy_grad.from += 2 * int64_t{head - head_of_grad} * dout.head_stride, head_of_grad = head;
      copy_grad(memory + kGradsAt, q, s.q_length - q);
    }
    cp_async_commit();
  };
  Steps<kRows, kRows, true, kThreads / 32> steps(p, s, work.first, first_head + group, shared + kStepsAt);
  int step[2] = {}, head[2] = {};  // this one and the next
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    step[0] = step[1], head[0] = head[1];
    step[1] = steps.next(), head[1] = steps.head();
    if (n == 0) load_queries(step[1], head[1], 0), load_grads(step[1], head[1]);
  }
  float first[2][8][4] = {}, second[2][8][4] = {};
  const float scale = p.scale * kLog2e;
  const uint32_t own_at = memory + left_at<kDim>(own), weights_at = memory + kWeightsAt + left_at<64>(own);
  const uint32_t column_lane = columns_at<kDim>() + half * 32 * kDim * 2;
  const uint32_t sum_lane = word_at<kDim>(lane % 16, half * 8 + lane / 16);
  // Weights of half of the queries, and gradients of their scores, into shared memory.
  const auto meet = [&](auto masked, PairBits bits, uint32_t q_at, uint32_t grad_at, const uint8_t* numbers) {
    constexpr bool kMasked = decltype(masked)::value;
    float score[2][4][4], grad[2][4][4];
    const auto product = [&](uint32_t left_at, uint32_t base, float (&to)[2][4][4], int d, bool set) {
      uint32_t left[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) load_matrix_x4((left_at ^ (d << 5)) + m * 16 * kDim * 2, left[m]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t b[4];
        load_matrix_x4(((base + column_lane) ^ (d << 5)) + j * 16 * kDim * 2, b);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (set)
            Product<T>::set(to[m][2 * j], left[m], b[0], b[1]), Product<T>::set(to[m][2 * j + 1], left[m], b[2], b[3]);
          else
            Product<T>::add(to[m][2 * j], left[m], b[0], b[1]), Product<T>::add(to[m][2 * j + 1], left[m], b[2], b[3]);
        }
      }
    };
    const auto starts = [&](int j) { return starts_at(numbers, half * 32 + j * 8 + lane % 4 * 2); };
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) product(own_at, q_at, score, d, d == 0);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 v = starts(j);
#pragma unroll
      for (int m = 0; m < 2; ++m) grad[m][j][0] = v.x, grad[m][j][1] = v.y, grad[m][j][2] = v.z, grad[m][j][3] = v.w;
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) product(own_at + kTileBytes, grad_at, grad, d, false);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 l = lse2_at<kRows>(numbers, half * 32 + j * 8 + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[m][j][e] = exp2_approx(fmaf(score[m][j][e], scale, -(e % 2 ? l.y : l.x)));
    }
    if constexpr (kMasked) {
      for_bits<true>(bits.seen, [&](int m, int j, int e, bool seen) { score[m][j][e] = seen ? score[m][j][e] : 0.f; });
      if (p.dropout.p > 0.f)
        for_bits<true>(bits.kept, [&](int m, int j, int e, bool kept) {
          const float4 v = starts(j);
          grad[m][j][e] = kept ? grad[m][j][e] : e % 2 ? v.y : v.x;
        });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) grad[m][j][e] *= score[m][j][e];
    if constexpr (kMasked) {
      if (p.dropout.p > 0.f)
        for_bits<true>(bits.kept,
                       [&](int m, int j, int e, bool kept) { score[m][j][e] = kept ? score[m][j][e] : 0.f; });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint8_t* to = shared + kWeightsAt + word_at<64>(own + m * 16 + r * 8 + lane / 4, half * 4 + j) + lane % 4 * 4;
          *reinterpret_cast<uint32_t*>(to) = pair<T>(score[m][j][2 * r], score[m][j][2 * r + 1]);
          *reinterpret_cast<uint32_t*>(to + kWeightBytes) = pair<T>(grad[m][j][2 * r], grad[m][j][2 * r + 1]);
        }
  };
  const auto add = [&](uint32_t weights, uint32_t base, float (&to)[2][8][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t left[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) load_matrix_x4((weights ^ (k << 5)) + m * 16 * 64 * 2, left[m]);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        uint32_t b[4];
        load_matrix_x4_transposed(((base + sum_lane) ^ (d << 5)) + k * 16 * kDim * 2, b);
#pragma unroll
        for (int m = 0; m < 2; ++m)
          Product<T>::add(to[m][2 * d], left[m], b[0], b[1]), Product<T>::add(to[m][2 * d + 1], left[m], b[2], b[3]);
      }
    }
  };
  int slot = 0;
  while (step[0] != kNoStep) {
    cp_async_wait<0>();
    __syncthreads();
    load_queries(step[1], head[1], slot ^ 1);
    const uint32_t q_at = memory + kQueriesAt + slot * kTileBytes, grad_at = memory + kGradsAt;
    const uint8_t* numbers = shared + kNumbersAt + slot * kNumberBytes;
    if (step[0] & 1) {
      meet(std::false_type(), {}, q_at, grad_at, numbers);
    } else {
      const AttentionSequence of(p, work.b, head[0], work.phase);
      const PairBits bits = pair_bits(p, of, step[0] + half * 32 + lane, work.first + own);
      meet(std::true_type(), bits, q_at, grad_at, numbers);
    }
    named_barrier(1 + own / 32, 64);
    add(weights_at, grad_at, second);
    __syncthreads();  // dO has been read
    load_grads(step[1], head[1]);
    add(weights_at + kWeightBytes, q_at, first);
    step[0] = step[1], head[0] = head[1];
    step[1] = steps.next(), head[1] = steps.head();
    slot ^= 1;
  }
  cp_async_wait<0>();
  __syncthreads();
  const int first_row = work.first + own, rows = p.phase_k_length() - first_row, there = used - own - lane / 4;
  const float keep = a.keep();
  uint8_t* mine = shared + threadIdx.x / 32 * (kWarpRows * 64 * 2);
  const auto store = [&](const float (&sums)[2][8][4], float factor, const AttentionTensor& to) {
    store_rows<T, 64>(
        sums, [&](int i) { return i * 8 < there ? factor : 0.f; }, mine, s.at<T>(to, work.head, first_row) + half * 64,
        to.stride * s.phases, rows, p.head_dim / 8 - half * 8);
  };
  store(first, p.scale * keep, a.p.grad_k);
  store(second, keep, a.p.grad_v);
}

}  // namespace

template <class T>
Status launch_pairs(const GradArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = attention_grad_pairs_kernel<T>;
  const AttentionParams& p = a.p.forward;
  if (!p.phase_k_length()) return ok_status();
  dim3 grid;
  SBNET_TRY(attention_grid(kAttentionBackwardOp, p, p.phase_k_length(), p.kv_heads, 1, &grid, kRows));
  SBNET_TRY(allow_shared<kernel>(kAttentionBackwardOp, device, kBytes));
  SBNET_CUDA_TRY(kAttentionBackwardOp, launch_dependent(device, kernel, grid, dim3(kThreads), kBytes, stream, a));
  return ok_status();
}
template Status launch_pairs<__half>(const GradArgs&, const DeviceInfo&, cudaStream_t);
template Status launch_pairs<__nv_bfloat16>(const GradArgs&, const DeviceInfo&, cudaStream_t);

}  // namespace sbnet::portable
