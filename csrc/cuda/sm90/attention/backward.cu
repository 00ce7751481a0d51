// Which problems the Hopper backward of block-sparse attention takes, how it cuts them, and its steps.
#include <algorithm>

#include "cuda/sm90/attention/attention.h"
#include "cuda/sm90/attention/backward_launch.cuh"

namespace sbnet::sm90 {
namespace attention {

// A table; reach: how many keys before it a query sees at most.
//   blocks up to 64, a reach up to 256, dropout     each warpgroup on its own
//   the rest                                        shared
//   a reach up to 256, dropout, or deterministic    two passes
BackwardPlan backward_plan(const AttentionBackwardParams& p) {
  const AttentionLayout& a = p.forward.layout;
  const int32_t keys = p.forward.phase_k_length();
  const int32_t reach = a.rows || a.rule.stride ? INT32_MAX : std::min(a.rule.band, keys);
  const bool drops = p.forward.dropout.p > 0;
  return {!(reach <= 256 || drops || (a.rows && a.block <= 64)), reach <= 256 || drops || p.deterministic};
}

Cut backward_cut(const AttentionParams& p, const BackwardPlan& plan, bool of_queries) {
  const int32_t own = plan.shared ? 128 : 64;
  // As in backward_d64.cu and so on.
  const int32_t met = plan.shared && (p.head_dim == 64 || of_queries) ? 128 : 64;
  return {own, met, 64, 64, 1, !of_queries};
}

namespace {

// The workspace: rows' numbers, sums, then lists.
struct Sizes {
  int32_t padded, planes;
  int64_t rows, sums, key_lists, query_lists;
  int64_t bytes() const { return 2 * rows + sums + key_lists + query_lists; }
};

Sizes sizes_of(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  const BackwardPlan plan = backward_plan(p);
  Sizes s = {};
  s.padded = (f.phase_q_length() + 127) / 128 * 128;
  s.planes = static_cast<int32_t>(f.batch * f.heads * f.layout.rule.phases);
  s.rows = round_up(int64_t{s.planes} * s.padded * 4);
  s.sums = plan.two_passes ? 0 : round_up(int64_t{s.planes} * s.padded * f.head_dim * 4);
  s.key_lists = lists_bytes(plan_lists(f, backward_cut(f, plan, false)));
  s.query_lists = plan.two_passes ? lists_bytes(plan_lists(f, backward_cut(f, plan, true))) : 0;
  return s;
}

}  // namespace
}  // namespace attention

using namespace attention;

bool block_attention_backward_takes(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (!takes_shapes(f) || !f.q_length || !strides_fit(p.grad_out, f.batch, f.heads, f.q_length) ||
      !strides_fit(p.grad_q, f.batch, f.heads, f.q_length) || !strides_fit(p.grad_k, f.batch, f.kv_heads, f.k_length) ||
      !strides_fit(p.grad_v, f.batch, f.kv_heads, f.k_length))
    return false;
  const BackwardPlan plan = backward_plan(p);
  if (!lists_hold(plan_lists(f, backward_cut(f, plan, false)), f)) return false;
  if (plan.two_passes && !lists_hold(plan_lists(f, backward_cut(f, plan, true)), f)) return false;
  const int64_t padded = (int64_t{f.phase_q_length()} + 127) / 128 * 128;
  // CTAs of the kernels before and after, and entries with a tile's number and a sign.
  return f.batch * f.heads * f.layout.rule.phases * padded * f.head_dim / 2048 < INT32_MAX;
}

int64_t block_attention_backward_workspace_bytes(const AttentionBackwardParams& p) { return sizes_of(p).bytes(); }

Status block_attention_backward(const AttentionBackwardParams& p, void* workspace, const DeviceInfo& device,
                                cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  if (!f.batch) return ok_status();
  const BackwardPlan plan = backward_plan(p);
  const Sizes sizes = sizes_of(p);
  uint8_t* at = static_cast<uint8_t*>(workspace);
  const auto take = [&](int64_t bytes) {
    uint8_t* from = at;
    at += bytes;
    return bytes ? reinterpret_cast<float*>(from) : nullptr;
  };
  BackwardSpace space = {};
  space.lse2 = take(sizes.rows), space.delta = take(sizes.rows), space.sums = take(sizes.sums);
  space.padded = sizes.padded, space.planes = sizes.planes;
  const auto lists_of = [&](bool of_queries, int64_t bytes, Lists* lists) {
    return make_lists(kBackwardOp, f, backward_cut(f, plan, of_queries), take(bytes), device, stream, lists);
  };
  const bool narrow = f.head_dim == 64;
  Lists of_keys, of_queries;
  SBNET_TRY(prepare_backward(p, space, device, stream));
  SBNET_TRY(lists_of(false, sizes.key_lists, &of_keys));
  if (!plan.two_passes) {
    BackwardLaunch* launch = narrow ? launch_backward_d64 : launch_backward_d128;
    SBNET_TRY(launch(p, plan, space, of_keys, false, device, stream));
    return finish_backward(p, space, device, stream);
  }
  SBNET_TRY(lists_of(true, sizes.query_lists, &of_queries));
  BackwardLaunch* launch = narrow ? launch_backward_d64_passes : launch_backward_d128_passes;
  SBNET_TRY(launch(p, plan, space, of_keys, false, device, stream));
  return launch(p, plan, space, of_queries, true, device, stream);
}

}  // namespace sbnet::sm90
