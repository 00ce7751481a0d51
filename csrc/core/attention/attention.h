// Block-sparse attention: out = softmax(scale * q k^T) v over the keys that the layout makes visible to each query,
// computed as flash attention does (arXiv 2205.14135), and its gradients. A query that sees no key gets zeros.
#pragma once
#include "core/attention/layout.h"
#include "core/kernels.h"

namespace sbnet {

// [batch, heads, length, head_dim] with elements of a head next to each other; strides in elements. Data and strides
// are multiples of 16 bytes, so that a row can be read as vectors.
struct AttentionTensor {
  void* data;
  int64_t batch_stride, head_stride, stride;  // stride: from a position to the next
};

// Each weight of the softmax is dropped with probability p and else scaled by 1/(1-p). Which ones: attention_dropped().
struct AttentionDropout {
  float p;              // 0: none
  const int64_t* seed;  // [2] on the op's device: key and offset of Philox; null where p is 0
};

struct AttentionParams {
  DType dtype;  // of q, k, v, out: float32, float16 or bfloat16; products and softmax are float32
  int64_t batch;
  int32_t heads, kv_heads;     // query head h reads key head h / (heads / kv_heads)
  int32_t q_length, k_length;  // of the tensors, all phases together
  int32_t head_dim;            // 16 ... 256, a multiple of 8
  float scale;
  AttentionTensor q, k, v;
  AttentionTensor out;
  float* lse;  // [batch, heads, q_length] log of the sum of exponentials; -inf without keys. Backward reads it.
  // [batch, heads, q_length, 2] or null: the largest scaled score of a query and its sum of exp(score - largest). The
  // backward of float32 reads them: an lse of 10 is rounded by more than the scores are.
  float* sums;
  AttentionLayout layout;
  const int32_t* q_lengths;  // [batch] on the device, null for none: queries from there on get zeros. Any value is
  const int32_t* k_lengths;  // clamped to [0, length]; keys from there on are invisible
  AttentionDropout dropout;

  SBNET_HOST_DEVICE int32_t phase_q_length() const { return q_length / layout.rule.phases; }
  SBNET_HOST_DEVICE int32_t phase_k_length() const { return k_length / layout.rule.phases; }
};

struct AttentionBackwardParams {
  AttentionParams forward;  // with out and lse as the forward left them
  AttentionTensor grad_out;
  const float* grad_lse;  // [batch, heads, q_length] or null
  AttentionTensor grad_q, grad_k, grad_v;
  bool deterministic;  // the same bits at every run; kernels may be faster without
};

SBNET_EXPORT Status validate(const AttentionParams& p);
SBNET_EXPORT Status validate(const AttentionBackwardParams& p);

// Of `length` positions, those of phase j that are below a sequence's own length (null: `length`).
SBNET_HOST_DEVICE inline int32_t phase_length(const int32_t* lengths, int64_t b, int32_t length, int32_t phases,
                                              int32_t j) {
  int32_t n = lengths ? lengths[b] : length;
  n = n < 0 ? 0 : n > length ? length : n;
  return n > j ? (n - j + phases - 1) / phases : 0;
}

// Philox-4x32-10 (Salmon et al., 2011).
struct PhiloxWords {
  uint32_t v[4];
};
SBNET_HOST_DEVICE inline PhiloxWords philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}
// 16 bits for each of the 8 pairs of query q and keys 8*key_octet ...; pair i is dropped if its bits are below
// dropout_threshold. q and keys count positions of one phase; plane is (batch*heads + head)*phases + phase.
SBNET_HOST_DEVICE inline PhiloxWords dropout_bits(uint64_t key, uint64_t offset, uint32_t plane, uint32_t q,
                                                  uint32_t key_octet) {
  return philox(key ^ (offset * 0x9E3779B97F4A7C15ull), key_octet, q, plane, static_cast<uint32_t>(offset >> 32));
}
SBNET_HOST_DEVICE inline bool is_dropped(const PhiloxWords& bits, int i, uint32_t threshold) {
  return (bits.v[i >> 1] >> 16 * (i & 1) & 0xffffu) < threshold;
}
inline uint32_t dropout_threshold(float p) { return static_cast<uint32_t>(p * 65536.0f + 0.5f); }

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(block_attention, AttentionParams)
SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(block_attention_backward, AttentionBackwardParams)
