#include "core/attention/attention.h"

#include <cmath>

namespace sbnet {
namespace {

Status check_tensor(const char* op, const char* argument, const AttentionTensor& t, DType dtype, bool written) {
  const int64_t unit = 16 / dtype_size(dtype);
  SBNET_CHECK(reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.batch_stride % unit == 0 &&
                  t.head_stride % unit == 0 && t.stride % unit == 0,
              "%s: %s: expected data and strides that are multiples of 16 bytes", op, argument);
  SBNET_CHECK(!written || (t.batch_stride >= 0 && t.head_stride >= 0 && t.stride >= 0),
              "%s: %s: expected strides of 0 or more", op, argument);
  return ok_status();
}

Status check_forward(const char* op, const AttentionParams& p) {
  SBNET_CHECK(is_compute_dtype(p.dtype), "%s: q: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(p.dtype));
  SBNET_CHECK(p.head_dim >= 16 && p.head_dim <= 256 && p.head_dim % 8 == 0,
              "%s: q: expected a head dimension of 16 to 256, a multiple of 8, got %d", op, p.head_dim);
  SBNET_CHECK(p.batch >= 0 && p.heads >= 1 && p.kv_heads >= 1 && p.heads % p.kv_heads == 0,
              "%s: k: expected a number of heads that divides the %d heads of q, got %d", op, p.heads, p.kv_heads);
  SBNET_CHECK(
      p.q_length >= 0 && p.q_length <= kMaxAttentionLength && p.k_length >= 0 && p.k_length <= kMaxAttentionLength,
      "%s: q, k: expected at most 2^29 positions, got %d and %d", op, p.q_length, p.k_length);
  const int32_t phases = p.layout.rule.phases;
  SBNET_CHECK(phases >= 1 && p.q_length % phases == 0 && p.k_length % phases == 0,
              "%s: layout: expected %d queries and %d keys to be multiples of the stride, %d", op, p.q_length,
              p.k_length, phases);
  SBNET_CHECK(p.batch <= INT32_MAX / (int64_t{p.heads} * phases),
              "%s: q: expected fewer than 2^31 pairs of a sequence and a head, got %lld x %d x %d", op,
              static_cast<long long>(p.batch), p.heads, phases);
  SBNET_TRY(validate(op, p.layout, p.batch, p.heads, p.phase_q_length(), p.phase_k_length()));
  SBNET_CHECK(std::isfinite(p.scale), "%s: scale: expected a finite number, got %g", op, p.scale);
  SBNET_CHECK(p.dropout.p >= 0 && p.dropout.p < 1 && (p.dropout.p == 0 || p.dropout.seed),
              "%s: dropout: expected a probability of 0 to less than 1, with a seed, got %g", op, p.dropout.p);
  SBNET_TRY(check_tensor(op, "q", p.q, p.dtype, false));
  SBNET_TRY(check_tensor(op, "k", p.k, p.dtype, false));
  SBNET_TRY(check_tensor(op, "v", p.v, p.dtype, false));
  return check_tensor(op, "out", p.out, p.dtype, true);
}

}  // namespace

Status validate(const AttentionParams& p) { return check_forward("block_attention", p); }

Status validate(const AttentionBackwardParams& p) {
  const char* op = "block_attention_backward";
  SBNET_TRY(check_forward(op, p.forward));
  SBNET_CHECK(p.forward.lse || !p.forward.batch || !p.forward.q_length, "%s: lse: expected that of the forward", op);
  SBNET_CHECK(p.forward.sums || p.forward.dtype != DType::kF32 || !p.forward.batch || !p.forward.q_length,
              "%s: sums: expected those of the forward", op);
  SBNET_TRY(check_tensor(op, "grad_out", p.grad_out, p.forward.dtype, false));
  SBNET_TRY(check_tensor(op, "grad_q", p.grad_q, p.forward.dtype, true));
  SBNET_TRY(check_tensor(op, "grad_k", p.grad_k, p.forward.dtype, true));
  return check_tensor(op, "grad_v", p.grad_v, p.forward.dtype, true);
}

}  // namespace sbnet
