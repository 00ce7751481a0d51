// Host side of the attention kernels: tensor maps, which cut of a problem a kernel works on.
#pragma once
#include "cuda/sm90/attention/attention.h"
#include "cuda/sm90/attention/forward_load.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90::attention {

constexpr const char* kForwardOp = "block_attention";

// Boxes of 64 elements x `rows` positions of a phase.
inline Status position_map(CUtensorMap* map, const char* op, const char* name, const AttentionParams& p,
                           const AttentionTensor& t, int heads, int length, int rows) {
  const int phases = p.layout.rule.phases;
  const cuuint64_t size[5] = {cuuint64_t(p.head_dim), cuuint64_t(length / phases), cuuint64_t(phases),
                              cuuint64_t(heads), cuuint64_t(p.batch)};
  // Of a dimension of size 1 the stride may be anything; TMA needs a multiple of 16 bytes all the same.
  const auto bytes = [](int64_t stride, int64_t count) { return cuuint64_t(count > 1 ? stride * 2 : 16); };
  const cuuint64_t stride[4] = {bytes(t.stride * phases, length / phases), bytes(t.stride, phases),
                                bytes(t.head_stride, heads), bytes(t.batch_stride, p.batch)};
  const cuuint32_t box[5] = {64, cuuint32_t(rows), 1, 1, 1};
  return make_map(map, p.dtype, name, 5, t.data, size, stride, box, CU_TENSOR_MAP_SWIZZLE_128B, op);
}

inline DropoutArgs dropout_args(const AttentionDropout& d) {
  if (d.p == 0) return {nullptr, 0, 1.f};
  return {d.seed, dropout_threshold(d.p), 1.f / (1.f - d.p)};
}

// Ones at multiples of the rule's stride.
inline uint32_t stride_period(const AttentionRule& rule) {
  uint32_t ones = 0;
  for (int64_t bit = 0; rule.stride && bit < 32; bit += rule.stride) ones |= 1u << bit;
  return ones;
}

// How a warpgroup's work is cut, by forward.cu.
enum class ForwardKind {
  kWide,   // its group's warpgroups share tiles of 128 keys: long lists
  kAlone,  // 64 queries x 128 keys, on its own: small blocks
  kSmall,  // 64 queries x 64 keys: short lists
};
struct ForwardPlan {
  ForwardKind kind;
  Cut cut;
};
ForwardPlan forward_plan(const AttentionParams& p);

// Strides that TMA takes; all that the kernels require of a problem besides the size of their lists.
bool strides_fit(const AttentionTensor& t, int64_t batch, int64_t heads, int64_t length);
bool takes_shapes(const AttentionParams& p);

// forward_d64.cu, forward_d128.cu
using ForwardLaunch = Status(const AttentionParams& p, const ForwardPlan& plan, const Lists& lists,
                             const DeviceInfo& device, cudaStream_t stream);
extern ForwardLaunch *const launch_forward_d64, *const launch_forward_d128;

template <class C, auto kKernel>
Status launch_forward(const AttentionParams& p, const ForwardPlan& plan, const Lists& lists, const DeviceInfo& device,
                      cudaStream_t stream) {
  const int piece = plan.cut.columns;
  ForwardMaps maps;
  SBNET_TRY(position_map(&maps.q, kForwardOp, "q", p, p.q, p.heads, p.q_length, C::kQueries));
  SBNET_TRY(position_map(&maps.k, kForwardOp, "k", p, p.k, p.kv_heads, p.k_length, piece));
  SBNET_TRY(position_map(&maps.v, kForwardOp, "v", p, p.v, p.kv_heads, p.k_length, piece));
  SBNET_TRY(position_map(&maps.out, kForwardOp, "out", p, p.out, p.heads, p.q_length, 64));
  SBNET_TRY((allow_shared<kKernel>(kForwardOp, device, C::kBytes)));
  constexpr double kCacheBytes = 24e6;  // of the L2, for the keys and values of the planes worked on
  ForwardArgs a = {};
  a.lists = lists, a.layout = p.layout, a.q_lengths = p.q_lengths, a.k_lengths = p.k_lengths, a.lse = p.lse;
  a.planes = static_cast<int32_t>(p.batch * p.heads * p.layout.rule.phases);
  a.heads = p.heads, a.heads_per_kv = p.heads / p.kv_heads, a.q_length = p.q_length, a.k_length = p.k_length;
  const double fit = kCacheBytes / (4.0 * p.phase_k_length() * p.head_dim) * a.heads_per_kv;
  a.together = fit < 1 ? 1 : fit < a.planes ? static_cast<int32_t>(fit) : a.planes;
  while (1 << a.log_piece < piece) ++a.log_piece;
  a.stride_period = stride_period(p.layout.rule);
  a.scale = p.scale * 1.44269504f;
  a.dropout = dropout_args(p.dropout);
  const int64_t units = int64_t{a.planes} * lists.tiles;
  const int64_t ctas = units < device.sm_count ? units : device.sm_count;
  SBNET_CUDA_TRY(kForwardOp,
                 launch_dependent(device, kKernel, dim3(ctas), dim3(C::kThreads), C::kBytes, stream, maps, a));
  return ok_status();
}

}  // namespace sbnet::sm90::attention
