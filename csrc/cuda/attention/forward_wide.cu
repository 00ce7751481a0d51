// Block-sparse attention of float16 and bfloat16 by tensor cores for heads of more than 128 features. A CTA has 64
// queries and 128 columns of the output; scores and sums are float32, weights are rounded for the second product.
#include "cuda/attention/wide.cuh"

namespace sbnet::portable {
namespace wide {
namespace {

constexpr int shared_bytes(int dim) {
  return 2 * kTile * (2 * pitch_of(padded(dim)) + pitch_of(kColumns)) + static_cast<int>(sizeof(Buffers));
}
static_assert(shared_bytes(256) <= 99 * 1024);

// Over the four lanes of a row.
__device__ __forceinline__ float row_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float row_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

template <class T>
__global__ void __launch_bounds__(kThreads) attention_wide_kernel(const AttentionParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int dim = p.head_dim, columns = padded(dim), tile = kTile * pitch_of(columns);
  T* queries = reinterpret_cast<T*>(shared);
  T *keys = queries + tile, *values = keys + tile;
  Buffers& b = *reinterpret_cast<Buffers*>(values + kTile * pitch_of(kColumns));
  grid_dependency_wait();
  const AttentionWork work(p, p.phase_q_length(), p.heads);
  const AttentionSequence s(p, work.b, work.head, work.phase);
  const Dropout dropout(p);
  const int q0 = work.first, c0 = blockIdx.y * kColumns, used = min(max(s.q_length - q0, 0), kTile);
  load_rows(s.at<T>(p.q, s.h, q0), p.q.stride * s.phases, used, dim, 0, columns, queries);
  cp_async_commit();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;  // and row + 8
  const float scale = p.scale * kLog2e;
  float sums[kColumns / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  const auto touched = [&](int t) { return tile_touched(p.layout, s.plane, q0, kTile, t * kTile); };
  for_touched<kThreads>(used ? (s.k_length + kTile - 1) / kTile : 0, b.words, touched, [&](int t) {
    const int k0 = t * kTile, count = min(s.k_length - k0, kTile);
    load_rows(s.at<T>(p.k, s.kv_h, k0), p.k.stride * s.phases, count, dim, 0, columns, keys);
    cp_async_commit();
    load_rows(s.at<T>(p.v, s.kv_h, k0), p.v.stride * s.phases, count, dim, c0, kColumns, values);
    cp_async_commit();
    fill_bits<kThreads>(p, s, dropout, q0, k0, b.seen, b.kept);
    cp_async_wait<1>();
    __syncthreads();
    float score[8][4] = {};
    multiply(queries, pitch_of(columns), keys, pitch_of(columns), columns, score);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint64_t seen = b.seen[row + 8 * i] >> lane % 4 * 2;
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& v = score[n][2 * i + e];
          v = seen >> (n * 8 + e) & 1 ? v * scale : -INFINITY;
          top = fmaxf(top, v);
        }
      const float before = largest[i];
      largest[i] = fmaxf(before, row_max(top));
      const float base = largest[i] == -INFINITY ? 0.f : largest[i], shrink = exp2f(before - base);
      const uint64_t kept = dropout.on() ? b.kept[row + 8 * i] >> lane % 4 * 2 : ~uint64_t{0};
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& v = score[n][2 * i + e];
          const float weight = exp2f(v - base);
          added += weight;
          v = kept >> (n * 8 + e) & 1 ? weight : 0.f;
        }
      total[i] = total[i] * shrink + row_sum(added);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) sums[n][2 * i] *= shrink, sums[n][2 * i + 1] *= shrink;
    }
    cp_async_wait<0>();
    __syncthreads();
    accumulate(score, values, sums);
    __syncthreads();  // before the next tile's copies and bits
  });
  cp_async_wait<0>();
  const int rows = min(p.phase_q_length() - q0, kTile);
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factor[i] = total[i] == 0.f ? 0.f : dropout.keep / total[i];
    if (row + 8 * i >= rows || lane % 4 || blockIdx.y || !p.lse) continue;
    p.lse[s.row(p, q0 + row + 8 * i)] = total[i] == 0.f ? -INFINITY : (largest[i] + log2f(total[i])) * kLn2;
  }
  store(s.at<T>(p.out, s.h, q0), p.out.stride * s.phases, rows, dim, c0, factor[0], factor[1], sums);
}

template <class T>
Status launch_of(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = attention_wide_kernel<T>;
  dim3 grid;
  SBNET_TRY(attention_grid(kAttentionOp, p, p.phase_q_length(), p.heads, 2, &grid));
  SBNET_TRY(allow_shared<kernel>(kAttentionOp, device, shared_bytes(256)));
  SBNET_CUDA_TRY(kAttentionOp,
                 launch_dependent(device, kernel, grid, dim3(kThreads), shared_bytes(p.head_dim), stream, p));
  return ok_status();
}

}  // namespace
}  // namespace wide

Status launch_attention_wide(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.dtype == DType::kF16 ? wide::launch_of<__half>(p, device, stream)
                                : wide::launch_of<__nv_bfloat16>(p, device, stream);
}

}  // namespace sbnet::portable
