// Host side of the backward: how it cuts a problem, its workspace, launches.
#pragma once
#include "cuda/sm90/attention/backward_load.cuh"
#include "cuda/sm90/attention/launch.cuh"

namespace sbnet::sm90::attention {

constexpr const char* kBackwardOp = "block_attention_backward";

// How the warpgroups' work is cut, by backward.cu.
struct BackwardPlan {
  bool shared;      // pairs of warpgroups share tiles; else a warpgroup meets tiles of 64 on its own: blocks up to 64
  bool two_passes;  // the same bits at every run; faster where lists are short; with dropout
};
BackwardPlan backward_plan(const AttentionBackwardParams& p);

// Tiles of a pass: own rows x what they meet.
Cut backward_cut(const AttentionParams& p, const BackwardPlan& plan, bool of_queries);

struct BackwardSpace {
  float *lse2, *delta, *sums;  // as in BackwardArgs; sums null with two passes
  int32_t padded, planes;      // queries of a phase, to a multiple of 128; (batch, head, phase)s
};

// backward_prepare.cu
Status prepare_backward(const AttentionBackwardParams& p, const BackwardSpace& space, const DeviceInfo& device,
                        cudaStream_t stream);
Status finish_backward(const AttentionBackwardParams& p, const BackwardSpace& space, const DeviceInfo& device,
                       cudaStream_t stream);

// backward_d64.cu, backward_d128.cu: all in one pass; with _passes: dK and dV, or dQ.
using BackwardLaunch = Status(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardSpace& space,
                              const Lists& lists, bool of_queries, const DeviceInfo& device, cudaStream_t stream);
extern BackwardLaunch *const launch_backward_d64, *const launch_backward_d128, *const launch_backward_d64_passes,
                                                                                   *const launch_backward_d128_passes;

template <class C, auto kKernel>
Status launch_backward(const AttentionBackwardParams& p, const BackwardSpace& space, const Lists& lists,
                       const DeviceInfo& device, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const auto map = [&](CUtensorMap* m, const char* name, const AttentionTensor& t, bool queries, int rows) {
    return position_map(m, kBackwardOp, name, f, t, queries ? f.heads : f.kv_heads, queries ? f.q_length : f.k_length,
                        rows);
  };
  constexpr bool kQueries = C::kQueries;
  BackwardMaps maps = {};
  SBNET_TRY(map(&maps.own[0], kQueries ? "q" : "k", kQueries ? f.q : f.k, kQueries, C::kOwn));
  SBNET_TRY(map(&maps.own[1], kQueries ? "grad_out" : "v", kQueries ? p.grad_out : f.v, kQueries, C::kOwn));
  SBNET_TRY(map(&maps.met[0], kQueries ? "k" : "q", kQueries ? f.k : f.q, !kQueries, C::kMet));
  SBNET_TRY(map(&maps.met[1], kQueries ? "v" : "grad_out", kQueries ? f.v : p.grad_out, !kQueries, C::kMet));
  SBNET_TRY(map(&maps.grad[0], kQueries ? "grad_q" : "grad_k", kQueries ? p.grad_q : p.grad_k, kQueries, 64));
  if (!kQueries) SBNET_TRY(map(&maps.grad[1], "grad_v", p.grad_v, false, 64));
  SBNET_TRY((allow_shared<kKernel>(kBackwardOp, device, C::kBytes)));
  constexpr double kCacheBytes = 28e6;  // of the L2, for queries, their gradients and the sums of the planes worked on
  BackwardArgs a = {};
  a.lists = lists, a.layout = f.layout, a.q_lengths = f.q_lengths, a.k_lengths = f.k_lengths;
  a.lse2 = space.lse2, a.delta = space.delta, a.sums = space.sums;
  a.planes = kQueries ? space.planes : space.planes / f.heads * f.kv_heads;
  a.heads = f.heads, a.kv_heads = f.kv_heads, a.q_length = f.q_length, a.k_length = f.k_length;
  a.padded = space.padded, a.stride_period = stride_period(f.layout.rule);
  const double fit = kCacheBytes / (10.0 * f.phase_q_length() * f.head_dim);
  a.together = fit < 1 ? 1 : fit < a.planes ? static_cast<int32_t>(fit) : a.planes;
  a.dropout = dropout_args(f.dropout);
  a.scale = f.scale, a.scale_log2 = f.scale * 1.44269504f;
  const int64_t units = int64_t{a.planes} * lists.tiles, ctas = units < device.sm_count ? units : device.sm_count;
  SBNET_CUDA_TRY(kBackwardOp,
                 launch_dependent(device, kKernel, dim3(ctas), dim3(C::kThreads), C::kBytes, stream, maps, a));
  return ok_status();
}

}  // namespace sbnet::sm90::attention
