#include "core/attention/attention.h"

#include "core/layer.h"
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;
using MaybeTensor = std::optional<Tensor>;

// [batch, heads, length, head_dim] as kernels read it: copied where elements of a head are apart or off 16 bytes.
Tensor readable(const Call& call, const char* argument, const Tensor& t, const Tensor& q) {
  call.same_device(argument, t);
  check_rank(call.op(), argument, t, 4);
  SBNET_TORCH_EXPECT(t.scalar_type() == q.scalar_type(), call.op(), argument, dtype_name(to_dtype(call.op(), "q", q)),
                     ", the dtype of q, got ", dtype_name(to_dtype(call.op(), argument, t)));
  const int64_t unit = 16 / dtype_size(to_dtype(call.op(), argument, t));
  bool fits = t.size(3) <= 1 || t.stride(3) == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (t.size(d) <= 1 || t.stride(d) % (unit ? unit : 1) == 0);
  fits = fits && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  if (fits) return t;
  if (!t.is_contiguous()) return torch::stable::contiguous(t);
  const int64_t size[4] = {t.size(0), t.size(1), t.size(2), t.size(3)};
  Tensor copy = torch::stable::new_empty(t, {size, 4});  // a contiguous view that starts off 16 bytes
  torch::stable::copy_(copy, t);
  return copy;
}

AttentionTensor view(const Tensor& t) {
  AttentionTensor v = {address_of(t.data_ptr()), 0, 0, 0};
  if (t.size(0) > 1) v.batch_stride = t.stride(0);
  if (t.size(1) > 1) v.head_stride = t.stride(1);
  if (t.size(2) > 1) v.stride = t.stride(2);
  return v;
}

// Packed as t is: [batch, heads, length, head_dim], or with heads inside of positions. Keep in step with empty_like in
// sbnet/ops/attention/attention.py.
Tensor empty_as(const Tensor& t) {
  const bool heads_inside = t.stride(1) < t.stride(2);
  const int64_t size[4] = {t.size(0), t.size(heads_inside ? 2 : 1), t.size(heads_inside ? 1 : 2), t.size(3)};
  const Tensor out = torch::stable::new_empty(t, {size, 4});
  return heads_inside ? torch::stable::transpose(out, 1, 2) : out;
}

// Everything of a call but results: keeps the tensors alive that params point into.
struct Problem {
  Tensor q, k, v;
  AttentionParams p = {};

  Problem(const Call& call, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const MaybeTensor& rows,
          const MaybeTensor& columns, const MaybeTensor& mask_index, const MaybeTensor& masks,
          const MaybeTensor& q_lengths, const MaybeTensor& k_lengths, const MaybeTensor& seed, const Ints& layout,
          double scale, double dropout)
      : q(readable(call, "q", q_in, q_in)), k(readable(call, "k", k_in, q_in)), v(readable(call, "v", v_in, q_in)) {
    const char* op = call.op();
    SBNET_TORCH_EXPECT(k.size(0) == q.size(0) && k.size(3) == q.size(3), op, "k", "a batch of ", q.size(0),
                       " and a head dimension of ", q.size(3), ", got ", k.size(0), " and ", k.size(3));
    for (int d = 0; d < 4; ++d)
      SBNET_TORCH_EXPECT(v.size(d) == k.size(d), op, "v", "the shape of k, got ", v.size(d), " for ", k.size(d),
                         " in dimension ", d);
    p.dtype = to_dtype(op, "q", q);
    p.batch = q.size(0);
    p.heads = to_int32(op, "q", q.size(1)), p.kv_heads = to_int32(op, "k", k.size(1));
    p.q_length = to_int32(op, "q", q.size(2)), p.k_length = to_int32(op, "k", k.size(2));
    p.head_dim = to_int32(op, "q", q.size(3));
    p.scale = static_cast<float>(scale);
    p.q = view(q), p.k = view(k), p.v = view(v);
    SBNET_TORCH_EXPECT(layout.size() == 6, op, "layout", "6 numbers, got ", layout.size());
    AttentionRule& rule = p.layout.rule;
    int32_t* numbers[6] = {&rule.diagonal, &rule.band, &rule.prefix, &rule.stride, &rule.phases, &p.layout.block};
    for (int i = 0; i < 6; ++i) *numbers[i] = to_int32(op, "layout", layout[i]);
    SBNET_TORCH_EXPECT(p.layout.block > 0 && rule.phases > 0, op, "layout", "positive blocks, phases");
    set_blocks(call, rows, columns, mask_index, masks);
    if (q_lengths) p.q_lengths = call.int32("q_lengths", *q_lengths, p.batch);
    if (k_lengths) p.k_lengths = call.int32("k_lengths", *k_lengths, p.batch);
    p.dropout.p = static_cast<float>(dropout);
    if (seed) {
      call.same_device("seed", *seed);
      SBNET_TORCH_EXPECT(seed->scalar_type() == ScalarType::Long && seed->is_contiguous() && seed->numel() == 2, op,
                         "seed", "2 contiguous int64 numbers, got ", seed->numel());
      p.dropout.seed = static_cast<const int64_t*>(seed->const_data_ptr());
    }
  }

 private:
  void set_blocks(const Call& call, const MaybeTensor& rows, const MaybeTensor& columns, const MaybeTensor& mask_index,
                  const MaybeTensor& masks) {
    const char* op = call.op();
    AttentionLayout& a = p.layout;
    a.batches = a.heads = 1;
    const auto blocks = [&](int32_t length) {
      return static_cast<int32_t>((length / a.rule.phases + int64_t{a.block} - 1) / a.block);
    };
    a.q_blocks = blocks(p.q_length), a.k_blocks = blocks(p.k_length);
    if (rows) {
      check_rank(op, "rows", *rows, 4);
      a.batches = to_int32(op, "rows", rows->size(0)), a.heads = to_int32(op, "rows", rows->size(1));
      const int64_t planes = size_product({a.batches, a.heads});
      a.rows = words(call, "rows", *rows, size_product({planes, a.q_blocks, a.row_words()}));
      SBNET_TORCH_EXPECT(columns, op, "columns", "those of rows, got none");
      a.columns = words(call, "columns", *columns, size_product({planes, a.k_blocks, a.column_words()}));
    }
    if (mask_index) {
      a.mask_index = call.int32("mask_index", *mask_index, size_product({a.heads, a.q_blocks, a.k_blocks}));
      SBNET_TORCH_EXPECT(masks, op, "masks", "those of mask_index, got none");
      check_rank(op, "masks", *masks, 3);
      a.mask_count = to_int32(op, "masks", masks->size(0));
      a.masks = words(call, "masks", *masks, size_product({a.mask_count, a.block, a.mask_words()}));
    }
  }

  static const uint32_t* words(const Call& call, const char* argument, const Tensor& t, int64_t count) {
    return reinterpret_cast<const uint32_t*>(call.int32(argument, t, count));
  }
};

std::tuple<Tensor, Tensor> pack_attention_blocks(Tensor blocks) {
  const char* op = "pack_attention_blocks";
  const Call call(op, "blocks", blocks);
  check_rank(op, "blocks", blocks, 4);
  SBNET_TORCH_EXPECT(blocks.scalar_type() == ScalarType::Bool, op, "blocks", "bool, got ",
                     dtype_name(to_dtype(op, "blocks", blocks)));
  if (!blocks.is_contiguous()) blocks = torch::stable::contiguous(blocks);
  const int64_t B = blocks.size(0), H = blocks.size(1), Q = blocks.size(2), K = blocks.size(3);
  const Tensor rows = empty_int32(blocks, {B, H, Q, (K + 31) / 32});
  const Tensor columns = empty_int32(blocks, {B, H, K, (Q + 31) / 32});
  PackAttentionBlocksParams p = {static_cast<const uint8_t*>(blocks.const_data_ptr()),
                                 static_cast<uint32_t*>(rows.data_ptr()),
                                 static_cast<uint32_t*>(columns.data_ptr()),
                                 size_product({B, H}),
                                 to_int32(op, "blocks", Q),
                                 to_int32(op, "blocks", K)};
  check(SBNET_KERNELS(pack_attention_blocks)(call, &p));
  return {rows, columns};
}

// Runs into `out`; lse, and the numbers that a float32 backward reads besides it: [batch, heads, length, 2], else
// empty.
std::tuple<Tensor, Tensor> attend(const Call& call, Problem& problem, const Tensor& out) {
  AttentionParams& p = problem.p;
  const Tensor& q = problem.q;
  const int64_t size[4] = {q.size(0), q.size(1), q.size(2), 2}, none = 0;
  const Tensor lse = torch::stable::new_empty(q, {size, 3}, ScalarType::Float);
  const Tensor sums = p.dtype == DType::kF32 ? torch::stable::new_empty(q, {size, 4}, ScalarType::Float)
                                             : torch::stable::new_empty(q, {&none, 1}, ScalarType::Float);
  p.out = view(out);
  p.lse = static_cast<float*>(lse.data_ptr());
  if (p.dtype == DType::kF32) p.sums = static_cast<float*>(sums.data_ptr());
  check(named(call.op(), validate(p)));
  const Tensor scratch = workspace(q, SBNET_KERNELS(block_attention_workspace_bytes).bytes(call, &p));
  check(named(call.op(), SBNET_KERNELS(block_attention)(call, &p, scratch.data_ptr())));
  return {lse, sums};
}

std::tuple<Tensor, Tensor, Tensor> block_attention(Tensor q, Tensor k, Tensor v, MaybeTensor rows, MaybeTensor columns,
                                                   MaybeTensor mask_index, MaybeTensor masks, MaybeTensor q_lengths,
                                                   MaybeTensor k_lengths, MaybeTensor seed, Ints layout, double scale,
                                                   double dropout, bool /*of the backward*/) {
  const Call call("block_attention", "q", q);
  Problem problem(call, q, k, v, rows, columns, mask_index, masks, q_lengths, k_lengths, seed, layout, scale, dropout);
  const Tensor out = empty_as(q);
  const auto [lse, sums] = attend(call, problem, out);
  return {out, lse, sums};
}

void block_attention_(Tensor q, Tensor k, Tensor v, MaybeTensor rows, MaybeTensor columns, MaybeTensor mask_index,
                      MaybeTensor masks, MaybeTensor q_lengths, MaybeTensor k_lengths, Ints layout, double scale,
                      Tensor out) {
  const char* op = "block_attention_";
  const Call call(op, "q", q);
  Problem problem(call, q, k, v, rows, columns, mask_index, masks, q_lengths, k_lengths, {}, layout, scale, 0);
  call.same_device("out", out);
  check_rank(op, "out", out, 4);
  SBNET_TORCH_EXPECT(out.scalar_type() == q.scalar_type() && (out.size(3) <= 1 || out.stride(3) == 1), op, "out",
                     "the dtype of q, and elements of a head beside each other");
  for (int d = 0; d < 4; ++d)
    SBNET_TORCH_EXPECT(out.size(d) == q.size(d), op, "out", "the shape of q, got ", out.size(d), " for ", q.size(d),
                       " in dimension ", d);
  attend(call, problem, out);
}

std::tuple<Tensor, Tensor, Tensor> block_attention_backward(
    Tensor grad_out, MaybeTensor grad_lse, Tensor out, Tensor lse, Tensor sums, Tensor q, Tensor k, Tensor v,
    MaybeTensor rows, MaybeTensor columns, MaybeTensor mask_index, MaybeTensor masks, MaybeTensor q_lengths,
    MaybeTensor k_lengths, MaybeTensor seed, Ints layout, double scale, double dropout, bool deterministic) {
  const char* op = "block_attention_backward";
  const Call call(op, "q", q);
  Problem problem(call, q, k, v, rows, columns, mask_index, masks, q_lengths, k_lengths, seed, layout, scale, dropout);
  AttentionBackwardParams b = {};
  b.forward = problem.p;
  AttentionParams& p = b.forward;
  const int64_t statistics = size_product({p.batch, p.heads, p.q_length});
  const auto floats = [&](const char* argument, const Tensor& t, int64_t count) {
    call.same_device(argument, t);
    SBNET_TORCH_EXPECT(t.scalar_type() == ScalarType::Float && t.numel() == count, op, argument, count,
                       " float32 numbers, got ", t.numel());
    return t.is_contiguous() ? t : torch::stable::contiguous(t);
  };
  out = readable(call, "out", out, q), grad_out = readable(call, "grad_out", grad_out, q);
  for (int d = 0; d < 4; ++d)
    SBNET_TORCH_EXPECT(out.size(d) == q.size(d) && grad_out.size(d) == q.size(d), op, "out, grad_out",
                       "the shape of q, got ", out.size(d), " and ", grad_out.size(d), " for ", q.size(d),
                       " in dimension ", d);
  lse = floats("lse", lse, statistics);
  p.out = view(out), b.grad_out = view(grad_out);
  p.lse = static_cast<float*>(lse.data_ptr());
  if (p.dtype == DType::kF32) {
    sums = floats("sums", sums, size_product({statistics, 2}));
    p.sums = static_cast<float*>(sums.data_ptr());
  }
  if (grad_lse) {
    grad_lse = floats("grad_lse", *grad_lse, statistics);
    b.grad_lse = static_cast<const float*>(grad_lse->const_data_ptr());
  }
  const Tensor grad_q = empty_as(q), grad_k = empty_as(k), grad_v = empty_as(v);
  b.grad_q = view(grad_q), b.grad_k = view(grad_k), b.grad_v = view(grad_v);
  b.deterministic = deterministic;
  check(validate(b));
  const Tensor scratch = workspace(q, SBNET_KERNELS(block_attention_backward_workspace_bytes).bytes(call, &b));
  check(SBNET_KERNELS(block_attention_backward)(call, &b, scratch.data_ptr()));
  return {grad_q, grad_k, grad_v};
}

SBNET_TORCH_OPS(ops) {
  // Block-sparse attention. `rule` is diagonal, band, prefix, stride, phases, block_size; rows, columns, mask_index
  // and masks are AttentionLayout's of core/attention/layout.h.
  ops.add("pack_attention_blocks(Tensor blocks) -> (Tensor rows, Tensor columns)", TORCH_BOX(&pack_attention_blocks));
  ops.add(
      "block_attention(Tensor q, Tensor k, Tensor v, Tensor? rows, Tensor? columns, Tensor? mask_index, Tensor? masks, "
      "Tensor? q_lengths, Tensor? k_lengths, Tensor? seed, SymInt[] rule, float scale, float dropout, bool "
      "deterministic) -> (Tensor out, Tensor lse, Tensor sums)",
      TORCH_BOX(&block_attention));
  ops.add(
      "block_attention_(Tensor q, Tensor k, Tensor v, Tensor? rows, Tensor? columns, Tensor? mask_index, Tensor? "
      "masks, "
      "Tensor? q_lengths, Tensor? k_lengths, SymInt[] rule, float scale, Tensor(a!) out) -> ()",
      TORCH_BOX(&block_attention_));
  ops.add(
      "block_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor sums, Tensor q, "
      "Tensor k, Tensor v, Tensor? rows, Tensor? columns, Tensor? mask_index, Tensor? masks, Tensor? q_lengths, "
      "Tensor? k_lengths, Tensor? seed, SymInt[] rule, float scale, float dropout, bool deterministic) -> (Tensor "
      "grad_q, Tensor grad_k, Tensor grad_v)",
      TORCH_BOX(&block_attention_backward));
}

}  // namespace
}  // namespace sbnet::binding
