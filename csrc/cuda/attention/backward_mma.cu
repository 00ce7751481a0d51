// Gradients of block-sparse attention of float16 and bfloat16 by tensor cores, in two passes: dQ by tiles of queries;
// dK and dV by tiles of keys, the query heads of a group one after the other. The tile that stays is the left operand,
// so that weights and gradients of scores go from registers to registers. Nothing is added atomically. Halves of more
// than 176 features (kSliced) bring the other side's tiles through one buffer of 128 columns, so that 99 KB of shared
// memory (sm_86, sm_89) hold 256: the columns that a CTA sums come last, and those of the second tensor twice.
#include "cuda/attention/mma.cuh"

namespace sbnet::portable {
namespace mma {
namespace {

constexpr int kWhole = 176;  // the most features of which four whole tiles fit 99 KB

constexpr int shared_bytes(int dim, bool sliced) {
  const int stays = 2 * pitch_of(padded(dim)), moves = sliced ? pitch_of(128) : stays;
  return 2 * kTile * (stays + moves) + static_cast<int>(sizeof(Buffers));
}
static_assert(shared_bytes(kWhole, false) <= 99 * 1024 && shared_bytes(256, true) <= 99 * 1024);

// Scores to weights, gradients of weights to those of scores; rows are keys if kKeys, else queries.
template <bool kKeys>
__device__ __forceinline__ void softmax_grad(float scale, const Dropout& dropout, const Buffers& b,
                                             float (&score)[8][4], float (&grad)[8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = threadIdx.x / 32 * 16 + lane / 4 + e / 2 * 8, c = n * 8 + lane % 4 * 2 + e % 2;
      const int q = kKeys ? c : r, k = kKeys ? r : c;
      const QueryRow& row = b.queries[q];
      float weight = 0.f, of_score = 0.f;
      if (b.seen[q] >> k & 1) {
        const bool kept = !dropout.on() || (b.kept[q] >> k & 1);
        const float whole = exp2f((score[n][e] * scale - row.largest) * kLog2e);
        weight = kept ? whole * dropout.keep : 0.f;
        of_score = whole * ((kept ? grad[n][e] * dropout.keep : 0.f) - row.delta);
      }
      score[n][e] = weight, grad[n][e] = of_score;
    }
}

template <class T, int kColumns, bool kSliced, bool kKeys>
__global__ void __launch_bounds__(kThreads) attention_grad_mma_kernel(const AttentionBackwardArgs a) {
  extern __shared__ __align__(16) uint8_t shared[];
  const AttentionParams& p = a.p.forward;
  const int dim = p.head_dim, columns = padded(dim), pitch = pitch_of(columns), tile = kTile * pitch;
  T* first = reinterpret_cast<T*>(shared);  // what stays: q and dO, or k and v
  T *second = first + tile, *first_rows = second + tile, *second_rows = kSliced ? first_rows : first_rows + tile;
  Buffers& b = *reinterpret_cast<Buffers*>(kSliced ? first_rows + kTile * pitch_of(kColumns) : second_rows + tile);
  grid_dependency_wait();
  const int32_t length = kKeys ? p.phase_k_length() : p.phase_q_length(), heads = kKeys ? p.kv_heads : p.heads;
  const AttentionWork work(p, length, heads);
  const Dropout dropout(p);
  const int group = kKeys ? p.heads / p.kv_heads : 1, at = work.first, c0 = blockIdx.y * kColumns;
  const AttentionSequence any(p, work.b, work.head * group, work.phase);
  const int used = min(max((kKeys ? any.k_length : any.q_length) - at, 0), kTile);
  const AttentionTensor &left = kKeys ? p.k : p.q, &right = kKeys ? p.v : a.p.grad_out;
  load_rows(any.at<T>(left, work.head, at), left.stride * any.phases, used, dim, 0, columns, first);
  load_rows(any.at<T>(right, work.head, at), right.stride * any.phases, used, dim, 0, columns, second);
  cp_async_commit();
  if (!kKeys)
    for (int i = threadIdx.x; i < kTile; i += kThreads) b.queries[i] = query_row(a, any, at + i);
  float sums[kColumns / 8][4] = {}, value_sums[kKeys ? kColumns / 8 : 1][4] = {};
  for (int h = work.head * group; h < (work.head + 1) * group; ++h) {
    const AttentionSequence s(p, work.b, h, work.phase);
    const auto touched = [&](int t) {
      return tile_touched(p.layout, s.plane, kKeys ? t * kTile : at, kTile, kKeys ? at : t * kTile);
    };
    const int others = kKeys ? s.q_length : s.k_length;
    for_touched<kThreads>(used ? (others + kTile - 1) / kTile : 0, b.words, touched, [&](int t) {
      const int from = t * kTile, count = min(others - from, kTile);
      const AttentionTensor &one = kKeys ? p.q : p.k, &two = kKeys ? a.p.grad_out : p.v;
      const int head = kKeys ? h : s.kv_h;
      const auto start = [&](const AttentionTensor& t, int c, int count_of_columns, T* to) {
        load_rows(s.at<T>(t, head, from), t.stride * s.phases, count, dim, c, count_of_columns, to);
        cp_async_commit();
      };
      const auto next = [&](const AttentionTensor& t, int c) {  // into the one buffer, once it has been read
        __syncthreads();
        start(t, c, kColumns, first_rows);
        cp_async_wait<0>();
        __syncthreads();
      };
      if constexpr (kSliced) {
        start(two, 0, kColumns, second_rows);
      } else {
        start(one, 0, columns, first_rows);
        start(two, 0, columns, second_rows);
      }
      fill_bits<kThreads>(p, s, dropout, kKeys ? from : at, kKeys ? at : from, b.seen, b.kept);
      if (kKeys)
        for (int i = threadIdx.x; i < kTile; i += kThreads) b.queries[i] = query_row(a, s, from + i);
      cp_async_wait<0>();
      __syncthreads();
      float score[8][4] = {}, grad[8][4] = {};
      if constexpr (kSliced) {
        constexpr int kPitch = pitch_of(kColumns);
        const int c1 = kColumns - c0, rest = columns - kColumns;  // two slices; features from kColumns on
        multiply(second, pitch, second_rows, kPitch, kColumns, grad);
        next(two, kColumns);
        multiply(second + kColumns, pitch, second_rows, kPitch, rest, grad);
        next(one, c1);
        multiply(first + c1, pitch, first_rows, kPitch, c1 ? rest : kColumns, score);
        next(one, c0);
        multiply(first + c0, pitch, first_rows, kPitch, c0 ? rest : kColumns, score);
      } else {
        multiply(first, pitch, first_rows, pitch, columns, score);
        multiply(second, pitch, second_rows, pitch, columns, grad);
      }
      softmax_grad<kKeys>(p.scale, dropout, b, score, grad);
      const int have = kSliced ? kColumns : columns, from_column = kSliced ? 0 : c0;
      accumulate<T, kColumns>(grad, first_rows, have, from_column, sums);
      if constexpr (kKeys && kSliced) next(two, c0);
      if constexpr (kKeys) accumulate<T, kColumns>(score, second_rows, have, from_column, value_sums);
      __syncthreads();  // before the next tile's copies, bits and queries
    });
  }
  cp_async_wait<0>();
  const int rows = min(length - at, kTile);
  const AttentionTensor& to = kKeys ? a.p.grad_k : a.p.grad_q;
  store<T, kColumns>(any.at<T>(to, work.head, at), to.stride * any.phases, rows, dim, c0, p.scale, p.scale, sums);
  if constexpr (kKeys)
    store<T, kColumns>(any.at<T>(a.p.grad_v, work.head, at), a.p.grad_v.stride * any.phases, rows, dim, c0, 1.f, 1.f,
                       value_sums);
}

template <class T, int kColumns, bool kSliced, bool kKeys>
Status launch_pass(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = attention_grad_mma_kernel<T, kColumns, kSliced, kKeys>;
  const AttentionParams& p = a.p.forward;
  const char* op = kAttentionBackwardOp;
  const int32_t length = kKeys ? p.phase_k_length() : p.phase_q_length();
  if (!length) return ok_status();
  dim3 grid;
  const int bytes = shared_bytes(p.head_dim, kSliced);
  SBNET_TRY(attention_grid(op, p, length, kKeys ? p.kv_heads : p.heads, (p.head_dim + kColumns - 1) / kColumns, &grid));
  SBNET_TRY(reserve_shared<kernel>(op, p, device, bytes,
                                   shared_bytes(kSliced          ? 256
                                                : kColumns == 64 ? 64
                                                                 : kWhole,
                                                kSliced)));
  SBNET_CUDA_TRY(op, launch_dependent(device, kernel, grid, dim3(kThreads), bytes, stream, a));
  return ok_status();
}

template <class T, int kColumns, bool kSliced>
Status launch(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  SBNET_TRY((launch_pass<T, kColumns, kSliced, false>(a, device, stream)));
  return launch_pass<T, kColumns, kSliced, true>(a, device, stream);
}

template <class T>
Status launch_of(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int dim = a.p.forward.head_dim;
  if (dim <= 64) return launch<T, 64, false>(a, device, stream);
  return dim <= kWhole ? launch<T, 128, false>(a, device, stream) : launch<T, 128, true>(a, device, stream);
}

}  // namespace
}  // namespace mma

Status launch_attention_backward_mma(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return a.p.forward.dtype == DType::kF16 ? mma::launch_of<__half>(a, device, stream)
                                          : mma::launch_of<__nv_bfloat16>(a, device, stream);
}

}  // namespace sbnet::portable
