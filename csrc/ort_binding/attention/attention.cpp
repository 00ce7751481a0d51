#include "core/attention/attention.h"

#include <limits>

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

int32_t as_int32(const char* op, const char* name, int64_t v) {
  if (v < INT32_MIN || v > INT32_MAX) raise_expected(op, name, "32 bits, got ", v);
  return static_cast<int32_t>(v);
}

struct PackAttentionBlocks {
  static constexpr const char* kName = "pack_attention_blocks";
  static constexpr Argument kInputs[] = {{"blocks", kBool}};
  static constexpr Argument kOutputs[] = {{"rows", kInt32}, {"columns", kInt32}};
  static constexpr Types kTypes[] = {{kBool, kBool}};
  static constexpr int kInPlace = -1;

  explicit PackAttentionBlocks(const Attributes&) {}

  void infer(ShapeContext& s) const {
    const Dims blocks = s.input(0, 4);
    if (blocks.empty()) return;
    const auto words = [](const Dim& d) { return d.map([](int64_t v) { return (v + 31) / 32; }); };
    s.output(0, {blocks[0], blocks[1], blocks[2], words(blocks[3])});
    s.output(1, {blocks[0], blocks[1], blocks[3], words(blocks[2])});
  }

  void compute(Context& c) const {
    const Tensor blocks = c.input(0, 4);
    const int64_t B = blocks.shape[0], H = blocks.shape[1], Q = blocks.shape[2], K = blocks.shape[3];
    PackAttentionBlocksParams p = {};
    p.blocks = static_cast<const uint8_t*>(blocks.data);
    p.planes = size_product({B, H});
    p.q_blocks = as_int32(kName, "blocks", Q), p.k_blocks = as_int32(kName, "blocks", K);
    check(validate(p));
    p.rows = static_cast<uint32_t*>(c.output(0, {B, H, Q, (K + 31) / 32}));
    p.columns = static_cast<uint32_t*>(c.output(1, {B, H, K, (Q + 31) / 32}));
    check(SBNET_KERNELS(pack_attention_blocks)(c, &p));
  }
};

struct BlockAttention {
  static constexpr const char* kName = "block_attention";
  enum Position { kQ, kK, kV, kRows, kColumns, kMaskIndex, kMasks, kQLengths, kKLengths };
  static constexpr Argument kInputs[] = {{"q", kT},
                                         {"k", kT},
                                         {"v", kT},
                                         {"rows", kInt32, kOptional},
                                         {"columns", kInt32, kOptional},
                                         {"mask_index", kInt32, kOptional},
                                         {"masks", kInt32, kOptional},
                                         {"q_lengths", kInt32, kOptional},
                                         {"k_lengths", kInt32, kOptional}};
  static constexpr Argument kOutputs[] = {{"out", kT}, {"lse", kFloat}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  AttentionRule rule;
  int32_t block;
  float scale;

  explicit BlockAttention(const Attributes& a)
      : rule{number(a, "diagonal", kNoDiagonal), number(a, "band", kNoBand), number(a, "prefix", 0),
             number(a, "stride", 0), number(a, "phases", 1)},
        block(number(a, "block_size", 64)),
        scale(a.real("scale", std::numeric_limits<float>::quiet_NaN())) {
    if (rule.phases < 1 || block < 1)
      raise_expected(kName, "phases, block_size", "1 or more, got ", rule.phases, " and ", block);
  }
  static int32_t number(const Attributes& a, const char* name, int32_t otherwise) {
    return as_int32(kName, name, a.integer(name, otherwise));
  }

  void infer(ShapeContext& s) const {
    const Dims q = s.input(kQ, 4);
    s.input(kK, 4), s.input(kV, 4);
    if (q.empty()) return;
    s.output(0, q);
    s.output(1, {q[0], q[1], q[2]});
  }

  void compute(Context& c) const {
    const Tensor q = c.input(kQ, 4), k = c.input(kK, 4), v = c.input(kV, 4);
    AttentionParams p = {};
    p.dtype = q.dtype;
    p.batch = q.shape[0];
    p.heads = as_int32(kName, "q", q.shape[1]), p.kv_heads = as_int32(kName, "k", k.shape[1]);
    p.q_length = as_int32(kName, "q", q.shape[2]), p.k_length = as_int32(kName, "k", k.shape[2]);
    p.head_dim = as_int32(kName, "q", q.shape[3]);
    if (k.shape[0] != q.shape[0] || k.shape[3] != q.shape[3])
      raise_expected(kName, "k", "a batch of ", q.shape[0], " and a head dimension of ", q.shape[3], ", got ",
                     k.shape[0], " and ", k.shape[3]);
    if (v.shape != k.shape) raise_expected(kName, "v", "the shape of k");
    p.scale = scale;
    p.q = packed(q), p.k = packed(k), p.v = packed(v);
    p.layout.rule = rule;
    p.layout.block = block;
    set_blocks(c, p);
    p.q_lengths = lengths(c, kQLengths, p.batch), p.k_lengths = lengths(c, kKLengths, p.batch);
    check(validate(p));  // before an output of an absurd size is asked for
    Tensor out = q;
    out.data = c.output(0, q.shape);
    p.out = packed(out);
    p.lse = static_cast<float*>(c.output(1, {q.shape[0], q.shape[1], q.shape[2]}));
    run(c, SBNET_KERNELS(block_attention), p, SBNET_KERNELS(block_attention_workspace_bytes).bytes(c, &p));
  }

 private:
  static AttentionTensor packed(const Tensor& t) {
    const int64_t H = t.shape[1], T = t.shape[2], D = t.shape[3];
    return {const_cast<void*>(t.data), size_product({H, T, D}), size_product({T, D}), D};
  }
  static const int32_t* lengths(Context& c, size_t index, int64_t batch) {
    const Tensor t = c.input(index);
    return t.present ? c.int32(t, {batch}) : nullptr;
  }
  static const uint32_t* words(Context& c, const Tensor& t, const std::vector<int64_t>& shape) {
    return reinterpret_cast<const uint32_t*>(c.int32(t, shape));
  }
  void set_blocks(Context& c, AttentionParams& p) const {
    AttentionLayout& a = p.layout;
    const auto blocks = [&](int32_t length) {
      return static_cast<int32_t>((length / rule.phases + int64_t{block} - 1) / block);
    };
    a.q_blocks = blocks(p.q_length), a.k_blocks = blocks(p.k_length);
    a.batches = a.heads = 1;
    const Tensor rows = c.input(kRows, 4), columns = c.input(kColumns, 4), index = c.input(kMaskIndex, 3),
                 masks = c.input(kMasks, 3);
    if (rows.present != columns.present || index.present != masks.present)
      raise_expected(kName, "rows, columns, mask_index, masks", "each pair whole");
    if (rows.present) {
      a.batches = as_int32(kName, "rows", rows.shape[0]), a.heads = as_int32(kName, "rows", rows.shape[1]);
      a.rows = words(c, rows, {a.batches, a.heads, a.q_blocks, a.row_words()});
      a.columns = words(c, columns, {a.batches, a.heads, a.k_blocks, a.column_words()});
    }
    if (index.present) {
      a.mask_index = c.int32(index, {a.heads, a.q_blocks, a.k_blocks});
      a.mask_count = as_int32(kName, "masks", masks.shape[0]);
      a.masks = words(c, masks, {a.mask_count, block, a.mask_words()});
    }
  }
};

}  // namespace

SBNET_ORT_OPS(PackAttentionBlocks, BlockAttention)

}  // namespace sbnet::ort
