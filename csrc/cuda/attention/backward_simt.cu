// Gradients of block-sparse attention of float32, in two passes: dQ by tiles of queries; dK and dV by tiles of keys,
// the query heads of a group one after the other. Nothing is added atomically: the same bits at every run.
#include "cuda/attention/simt.cuh"

namespace sbnet::portable {
namespace simt {
namespace {

// Weights and gradients of scores from this thread's products; rows are keys if kKeys, else queries.
template <bool kKeys>
__device__ __forceinline__ void softmax_grad(float scale, const Dropout& dropout, const float (&score)[4][4],
                                             const float (&grad)[4][4], Buffers& b) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = thread_y() * 4 + i, c = thread_x() + 16 * j, q = kKeys ? c : r, k = kKeys ? r : c;
      const QueryRow& row = b.queries[q];
      float weight = 0.f, of_score = 0.f;
      if (b.seen[q] >> k & 1) {
        const bool kept = !dropout.on() || (b.kept[q] >> k & 1);
        const float whole = expf(score[i][j] * scale - row.largest) * row.factor;
        weight = kept ? whole * dropout.keep : 0.f;
        of_score = whole * ((kept ? grad[i][j] * dropout.keep : 0.f) - row.delta);
      }
      if (kKeys) b.weights[r * kWeightPitch + c] = weight;
      b.grads[r * kWeightPitch + c] = of_score;
    }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) query_grad_simt_kernel(const AttentionBackwardArgs a) {
  Buffers& b = begin();
  const AttentionParams& p = a.p.forward;
  const AttentionWork work(p, p.phase_q_length(), p.heads);
  const AttentionSequence s(p, work.b, work.head, work.phase);
  const Dropout dropout(p);
  const int q0 = work.first, c0 = blockIdx.y * kColumns, dim = p.head_dim;
  const int used = min(max(s.q_length - q0, 0), kTile);
  const Rows queries = {s.at<float>(p.q, s.h, q0), p.q.stride * s.phases, used};
  const Rows outs = {s.at<float>(a.p.grad_out, s.h, q0), a.p.grad_out.stride * s.phases, used};
  for (int i = threadIdx.x; i < kTile; i += kThreads) b.queries[i] = query_row(a, s, q0 + i);
  float sums[4][kColumns / 16] = {};
  const auto touched = [&](int t) { return tile_touched(p.layout, s.plane, q0, kTile, t * kTile); };
  for_touched<kThreads>(used ? (s.k_length + kTile - 1) / kTile : 0, b.words, touched, [&](int t) {
    const int k0 = t * kTile, count = min(s.k_length - k0, kTile);
    fill_bits<kThreads>(p, s, dropout, q0, k0, b.seen, b.kept);
    const Rows keys = {s.at<float>(p.k, s.kv_h, k0), p.k.stride * s.phases, count};
    float score[4][4], grad[4][4];
    multiply(queries, keys, dim, b, score);
    multiply(outs, Rows{s.at<float>(p.v, s.kv_h, k0), p.v.stride * s.phases, count}, dim, b, grad);
    softmax_grad<false>(p.scale, dropout, score, grad, b);
    accumulate<kColumns>(b.grads, keys, dim, c0, b, sums);
    __syncthreads();
  });
  const float factor[4] = {p.scale, p.scale, p.scale, p.scale};
  store<kColumns>(s.at<float>(a.p.grad_q, s.h, q0), a.p.grad_q.stride * s.phases, min(p.phase_q_length() - q0, kTile),
                  dim, c0, factor, sums);
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) key_grad_simt_kernel(const AttentionBackwardArgs a) {
  Buffers& b = begin();
  const AttentionParams& p = a.p.forward;
  const AttentionWork work(p, p.phase_k_length(), p.kv_heads);
  const Dropout dropout(p);
  const int group = p.heads / p.kv_heads, k0 = work.first, c0 = blockIdx.y * kColumns, dim = p.head_dim;
  const AttentionSequence any(p, work.b, work.head * group, work.phase);
  const int used = min(max(any.k_length - k0, 0), kTile);
  const Rows keys = {any.at<float>(p.k, work.head, k0), p.k.stride * any.phases, used};
  const Rows values = {any.at<float>(p.v, work.head, k0), p.v.stride * any.phases, used};
  float key_sums[4][kColumns / 16] = {}, value_sums[4][kColumns / 16] = {};
  for (int h = work.head * group; h < (work.head + 1) * group; ++h) {
    const AttentionSequence s(p, work.b, h, work.phase);
    const auto touched = [&](int t) { return tile_touched(p.layout, s.plane, t * kTile, kTile, k0); };
    for_touched<kThreads>(used ? (s.q_length + kTile - 1) / kTile : 0, b.words, touched, [&](int t) {
      const int q0 = t * kTile, count = min(s.q_length - q0, kTile);
      fill_bits<kThreads>(p, s, dropout, q0, k0, b.seen, b.kept);
      for (int i = threadIdx.x; i < kTile; i += kThreads) b.queries[i] = query_row(a, s, q0 + i);
      const Rows queries = {s.at<float>(p.q, h, q0), p.q.stride * s.phases, count};
      const Rows outs = {s.at<float>(a.p.grad_out, h, q0), a.p.grad_out.stride * s.phases, count};
      float score[4][4], grad[4][4];
      multiply(keys, queries, dim, b, score);
      multiply(values, outs, dim, b, grad);
      softmax_grad<true>(p.scale, dropout, score, grad, b);
      accumulate<kColumns>(b.grads, queries, dim, c0, b, key_sums);
      accumulate<kColumns>(b.weights, outs, dim, c0, b, value_sums);
      __syncthreads();
    });
  }
  const int rows = min(p.phase_k_length() - k0, kTile);
  const float scale[4] = {p.scale, p.scale, p.scale, p.scale}, one[4] = {1.f, 1.f, 1.f, 1.f};
  store<kColumns>(any.at<float>(a.p.grad_k, work.head, k0), a.p.grad_k.stride * any.phases, rows, dim, c0, scale,
                  key_sums);
  store<kColumns>(any.at<float>(a.p.grad_v, work.head, k0), a.p.grad_v.stride * any.phases, rows, dim, c0, one,
                  value_sums);
}

template <int kColumns>
Status launch(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const AttentionParams& p = a.p.forward;
  const char* op = kAttentionBackwardOp;
  const int slices = (p.head_dim + kColumns - 1) / kColumns;
  dim3 grid;
  if (p.q_length) {
    SBNET_TRY(attention_grid(op, p, p.phase_q_length(), p.heads, slices, &grid));
    SBNET_TRY(allow_shared<query_grad_simt_kernel<kColumns>>(op, device, sizeof(Buffers)));
    SBNET_CUDA_TRY(op, launch_dependent(device, query_grad_simt_kernel<kColumns>, grid, dim3(kThreads), sizeof(Buffers),
                                        stream, a));
  }
  if (p.k_length) {
    SBNET_TRY(attention_grid(op, p, p.phase_k_length(), p.kv_heads, slices, &grid));
    SBNET_TRY(allow_shared<key_grad_simt_kernel<kColumns>>(op, device, sizeof(Buffers)));
    SBNET_CUDA_TRY(
        op, launch_dependent(device, key_grad_simt_kernel<kColumns>, grid, dim3(kThreads), sizeof(Buffers), stream, a));
  }
  return ok_status();
}

}  // namespace
}  // namespace simt

Status launch_attention_backward_simt(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return a.p.forward.head_dim <= 64 ? simt::launch<64>(a, device, stream) : simt::launch<128>(a, device, stream);
}

}  // namespace sbnet::portable
