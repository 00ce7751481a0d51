// Gradients of block-sparse attention of float16 and bfloat16 by tensor cores for heads of more than 128 features, in
// two passes: dQ by tiles of queries; dK and dV by tiles of keys, the query heads of a group one after the other. The
// tile that stays is the left operand, so that weights and gradients of scores go from registers to registers. Nothing
// is added atomically. A CTA sums 128 columns. The other side's tiles come through one buffer of as many, so that 99 KB
// of shared memory (sm_86, sm_89) hold 256: the columns that a CTA sums come last, and those of the second tensor
// twice.
#include "cuda/attention/wide.cuh"

namespace sbnet::portable {
namespace wide {
namespace {

constexpr int kPitch = pitch_of(kColumns);

constexpr int shared_bytes(int dim) {
  return 2 * kTile * (2 * pitch_of(padded(dim)) + kPitch) + static_cast<int>(sizeof(Buffers));
}
static_assert(shared_bytes(256) <= 99 * 1024);

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

template <class T, bool kKeys>
__global__ void __launch_bounds__(kThreads) attention_grad_wide_kernel(const AttentionBackwardArgs a) {
  extern __shared__ __align__(16) uint8_t shared[];
  const AttentionParams& p = a.p.forward;
  const int dim = p.head_dim, columns = padded(dim), pitch = pitch_of(columns), tile = kTile * pitch;
  T* first = reinterpret_cast<T*>(shared);  // what stays: q and dO, or k and v
  T *second = first + tile, *met = second + tile;
  Buffers& b = *reinterpret_cast<Buffers*>(met + kTile * kPitch);
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
      const auto start = [&](const AttentionTensor& t, int c) {
        load_rows(s.at<T>(t, head, from), t.stride * s.phases, count, dim, c, kColumns, met);
        cp_async_commit();
      };
      const auto next = [&](const AttentionTensor& t, int c) {  // into the buffer, once it has been read
        __syncthreads();
        start(t, c);
        cp_async_wait<0>();
        __syncthreads();
      };
      start(two, 0);
      fill_bits<kThreads>(p, s, dropout, kKeys ? from : at, kKeys ? at : from, b.seen, b.kept);
      if (kKeys)
        for (int i = threadIdx.x; i < kTile; i += kThreads) b.queries[i] = query_row(a, s, from + i);
      cp_async_wait<0>();
      __syncthreads();
      float score[8][4] = {}, grad[8][4] = {};
      const int c1 = kColumns - c0, rest = columns - kColumns;  // two slices; features from kColumns on
      multiply(second, pitch, met, kPitch, kColumns, grad);
      next(two, kColumns);
      multiply(second + kColumns, pitch, met, kPitch, rest, grad);
      next(one, c1);
      multiply(first + c1, pitch, met, kPitch, c1 ? rest : kColumns, score);
      next(one, c0);
      multiply(first + c0, pitch, met, kPitch, c0 ? rest : kColumns, score);
      softmax_grad<kKeys>(p.scale, dropout, b, score, grad);
      accumulate(grad, met, sums);
      if constexpr (kKeys) {
        next(two, c0);
        accumulate(score, met, value_sums);
      }
      __syncthreads();  // before the next tile's copies, bits and queries
    });
  }
  cp_async_wait<0>();
  const int rows = min(length - at, kTile);
  const AttentionTensor& to = kKeys ? a.p.grad_k : a.p.grad_q;
  store(any.at<T>(to, work.head, at), to.stride * any.phases, rows, dim, c0, p.scale, p.scale, sums);
  if constexpr (kKeys)
    store(any.at<T>(a.p.grad_v, work.head, at), a.p.grad_v.stride * any.phases, rows, dim, c0, 1.f, 1.f, value_sums);
}

template <class T, bool kKeys>
Status launch_pass(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = attention_grad_wide_kernel<T, kKeys>;
  const AttentionParams& p = a.p.forward;
  const int32_t length = kKeys ? p.phase_k_length() : p.phase_q_length();
  if (!length) return ok_status();
  dim3 grid;
  SBNET_TRY(attention_grid(kAttentionBackwardOp, p, length, kKeys ? p.kv_heads : p.heads, 2, &grid));
  SBNET_TRY(allow_shared<kernel>(kAttentionBackwardOp, device, shared_bytes(256)));
  SBNET_CUDA_TRY(kAttentionBackwardOp,
                 launch_dependent(device, kernel, grid, dim3(kThreads), shared_bytes(p.head_dim), stream, a));
  return ok_status();
}

template <class T>
Status launch_of(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  SBNET_TRY((launch_pass<T, false>(a, device, stream)));
  return launch_pass<T, true>(a, device, stream);
}

}  // namespace
}  // namespace wide

Status launch_attention_backward_wide(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return a.p.forward.dtype == DType::kF16 ? wide::launch_of<__half>(a, device, stream)
                                          : wide::launch_of<__nv_bfloat16>(a, device, stream);
}

}  // namespace sbnet::portable
