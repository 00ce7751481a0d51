#include "core/attention/layout.h"

namespace sbnet {

Status validate(const PackAttentionBlocksParams& p) {
  const char* op = "pack_attention_blocks";
  SBNET_CHECK(p.planes >= 0 && p.planes <= INT32_MAX && p.q_blocks >= 0 && p.k_blocks >= 0,
              "%s: blocks: expected fewer than 2^31 bitmaps, got %lld", op, static_cast<long long>(p.planes));
  return ok_status();
}

Status validate(const char* op, const AttentionLayout& a, int64_t batch, int32_t heads, int32_t q_length,
                int32_t k_length) {
  const AttentionRule& r = a.rule;
  SBNET_CHECK(r.diagonal >= -kNoDiagonal && r.diagonal <= kNoDiagonal && r.band >= 1 && r.prefix >= 0 &&
                  r.stride >= 0 && r.prefix <= kMaxAttentionLength && r.stride <= kMaxAttentionLength,
              "%s: layout: expected a diagonal within 2^30, a band of at least 1, a prefix and a stride of 0 to 2^29, "
              "got %d, %d, %d, %d",
              op, r.diagonal, r.band, r.prefix, r.stride);
  SBNET_CHECK(r.diagonal < kNoDiagonal || (r.band == kNoBand && !r.stride),
              "%s: layout: expected a diagonal with a band or a stride", op);
  SBNET_CHECK(!r.prefix || (r.band == kNoBand && !r.stride), "%s: layout: expected no prefix with a band or a stride",
              op);
  SBNET_CHECK(a.block == 8 || a.block == 16 || a.block == 32 || a.block == 64 || a.block == 128,
              "%s: layout: expected blocks of 8, 16, 32, 64 or 128, got %d", op, a.block);
  const int64_t q_blocks = (int64_t{q_length} + a.block - 1) / a.block;
  const int64_t k_blocks = (int64_t{k_length} + a.block - 1) / a.block;
  SBNET_CHECK(a.q_blocks == q_blocks && a.k_blocks == k_blocks,
              "%s: layout: expected %lldx%lld blocks of %d for %d queries and %d keys, got %dx%d", op,
              static_cast<long long>(q_blocks), static_cast<long long>(k_blocks), a.block, q_length, k_length,
              a.q_blocks, a.k_blocks);
  SBNET_CHECK((a.batches == 1 || a.batches == batch) && (a.heads == 1 || a.heads == heads),
              "%s: layout: expected 1 or %lld batches and 1 or %d heads, got %d and %d", op,
              static_cast<long long>(batch), heads, a.batches, a.heads);
  SBNET_CHECK(!a.rows == !a.columns && !a.mask_index == !a.masks && (!a.masks || a.rows) && a.mask_count >= 0,
              "%s: layout: expected bitmaps of rows and columns together, and with any masks", op);
  SBNET_CHECK(a.rows || a.block == 64, "%s: layout: expected blocks of 64 where all of them are active, got %d", op,
              a.block);
  SBNET_CHECK(r.phases >= 1 && (r.phases == 1 || !a.rows),
              "%s: layout: expected 1 or more phases, and no bitmap with more than 1, got %d", op, r.phases);
  return ok_status();
}

}  // namespace sbnet
