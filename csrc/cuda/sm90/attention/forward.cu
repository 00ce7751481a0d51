// Which problems the Hopper forward of block-sparse attention takes, and how it cuts them.
#include <algorithm>

#include "cuda/sm90/attention/attention.h"
#include "cuda/sm90/attention/launch.cuh"

namespace sbnet::sm90 {
namespace attention {

// A table, first match wins; reach: how many keys before it a query sees at most.
//   dropout                            kAlone
//   blocks of 128, heads of 128        kWide
//   blocks                             kAlone
//   reach or a phase of few keys       kSmall
//   the rest                           kWide
ForwardPlan forward_plan(const AttentionParams& p) {
  const AttentionLayout& a = p.layout;
  const int32_t block = a.rows ? a.block : 128;
  const int32_t reach = a.rule.stride ? p.phase_k_length() : std::min(a.rule.band, p.phase_k_length());
  const bool narrow = p.head_dim == 64;
  ForwardPlan plan = {ForwardKind::kWide, {}};
  if (p.dropout.p > 0)
    plan.kind = ForwardKind::kAlone;
  else if (a.rows)
    plan.kind = block == 128 && !narrow ? ForwardKind::kWide : ForwardKind::kAlone;
  else if (reach <= (narrow ? 1024 : 512))
    plan.kind = ForwardKind::kSmall;
  const bool small = plan.kind == ForwardKind::kSmall;
  Cut& cut = plan.cut;
  cut.rows = plan.kind == ForwardKind::kWide ? (narrow ? 192 : 128) : 64;
  cut.columns = small || (!a.rows && a.rule.band != kNoBand) ? 64 : block;
  cut.cell_rows = std::min(block, 64), cut.cell_columns = cut.columns;
  cut.cell_bits = cut.cell_rows / 16;
  return plan;
}

// Strides that TMA takes: multiples of 16 bytes (validated), not 0 where there is more than one, below 2^40 bytes.
bool strides_fit(const AttentionTensor& t, int64_t batch, int64_t heads, int64_t length) {
  const auto fits = [](int64_t stride, int64_t count) {
    return count <= 1 || (stride > 0 && stride < (int64_t{1} << 39) / count);
  };
  return fits(t.batch_stride, batch) && fits(t.head_stride, heads) && fits(t.stride, length);
}

bool takes_shapes(const AttentionParams& p) {
  const bool half = p.dtype == DType::kF16 || p.dtype == DType::kBF16;
  return half && (p.head_dim == 64 || p.head_dim == 128) && p.k_length > 0 && p.layout.block >= 16 &&
         p.batch * p.heads * p.layout.rule.phases < (1 << 30) && strides_fit(p.q, p.batch, p.heads, p.q_length) &&
         strides_fit(p.k, p.batch, p.kv_heads, p.k_length) && strides_fit(p.v, p.batch, p.kv_heads, p.k_length) &&
         strides_fit(p.out, p.batch, p.heads, p.q_length);
}

}  // namespace attention

using namespace attention;

bool block_attention_takes(const AttentionParams& p) {
  return takes_shapes(p) && lists_hold(plan_lists(p, forward_plan(p).cut), p);
}

int64_t block_attention_workspace_bytes(const AttentionParams& p) {
  return lists_bytes(plan_lists(p, forward_plan(p).cut));
}

Status block_attention(const AttentionParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  if (!p.batch || !p.q_length) return ok_status();
  const ForwardPlan plan = forward_plan(p);
  Lists lists;
  SBNET_TRY(make_lists(kForwardOp, p, plan.cut, workspace, device, stream, &lists));
  return p.head_dim == 64 ? launch_forward_d64(p, plan, lists, device, stream)
                          : launch_forward_d128(p, plan, lists, device, stream);
}

}  // namespace sbnet::sm90
