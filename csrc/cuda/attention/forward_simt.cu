// Block-sparse attention of float32, in float32. A CTA has 64 queries and 64 or 128 columns of the output.
#include "cuda/attention/simt.cuh"

namespace sbnet::portable {
namespace simt {
namespace {

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attention_simt_kernel(const AttentionParams p) {
  Buffers& b = begin();
  const AttentionWork work(p, p.phase_q_length(), p.heads);
  const AttentionSequence s(p, work.b, work.head, work.phase);
  const Dropout dropout(p);
  const int q0 = work.first, c0 = blockIdx.y * kColumns, dim = p.head_dim;
  const Rows queries = {s.at<float>(p.q, s.h, q0), p.q.stride * s.phases, min(max(s.q_length - q0, 0), kTile)};
  float sums[4][kColumns / 16] = {}, largest[4], total[4] = {};
#pragma unroll
  for (float& m : largest) m = -INFINITY;
  const auto touched = [&](int t) { return tile_touched(p.layout, s.plane, q0, kTile, t * kTile); };
  const int tiles = queries.count ? (s.k_length + kTile - 1) / kTile : 0;
  for_touched<kThreads>(tiles, b.words, touched, [&](int t) {
    const int k0 = t * kTile, count = min(s.k_length - k0, kTile);
    fill_bits<kThreads>(p, s, dropout, q0, k0, b.seen, b.kept);
    float score[4][4];
    multiply(queries, Rows{s.at<float>(p.k, s.kv_h, k0), p.k.stride * s.phases, count}, dim, b, score);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = thread_y() * 4 + i;
      const uint64_t seen = b.seen[r], kept = dropout.on() ? b.kept[r] : ~uint64_t{0};
#pragma unroll
      for (int j = 0; j < 4; ++j) score[i][j] = seen >> (thread_x() + 16 * j) & 1 ? score[i][j] * p.scale : -INFINITY;
      const auto keep = [&](int j) { return kept >> (thread_x() + 16 * j) & 1; };
      weigh(score[i], b.weights + r * kWeightPitch + thread_x(), keep, largest[i], total[i], sums[i]);
    }
    accumulate<kColumns>(b.weights, Rows{s.at<float>(p.v, s.kv_h, k0), p.v.stride * s.phases, count}, dim, c0, b, sums);
    __syncthreads();  // before the next tile's bits and weights
  });
  float factor[4];
  const int rows = min(p.phase_q_length() - q0, kTile);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    factor[i] = total[i] == 0.f ? 0.f : dropout.keep / total[i];
    const int r = thread_y() * 4 + i;
    if (r >= rows || thread_x() || blockIdx.y) continue;
    const int64_t row = s.row(p, q0 + r);
    if (p.lse) p.lse[row] = total[i] == 0.f ? -INFINITY : largest[i] + logf(total[i]);
    if (p.sums) p.sums[2 * row] = largest[i], p.sums[2 * row + 1] = total[i];
  }
  store<kColumns>(s.at<float>(p.out, s.h, q0), p.out.stride * s.phases, rows, dim, c0, factor, sums);
}

template <int kColumns>
Status launch(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  dim3 grid;
  SBNET_TRY(
      attention_grid(kAttentionOp, p, p.phase_q_length(), p.heads, (p.head_dim + kColumns - 1) / kColumns, &grid));
  SBNET_TRY(allow_shared<attention_simt_kernel<kColumns>>(kAttentionOp, device, sizeof(Buffers)));
  SBNET_CUDA_TRY(kAttentionOp, launch_dependent(device, attention_simt_kernel<kColumns>, grid, dim3(kThreads),
                                                sizeof(Buffers), stream, p));
  return ok_status();
}

}  // namespace
}  // namespace simt

Status launch_attention_simt(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.head_dim <= 64 ? simt::launch<64>(p, device, stream) : simt::launch<128>(p, device, stream);
}

}  // namespace sbnet::portable
