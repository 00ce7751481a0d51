#include "core/weights/matmul.h"

#include "core/grid.h"
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;

// `layout` as Python has it: block rows, block columns, blocks, in_features, out_features, block_size, and the words of
// the plans of the three passes, which follow the tables.
struct Layout {
  BlockLayoutShape shape;
  int64_t plan_words[3];
};

Layout to_layout(const char* op, const Ints& v) {
  SBNET_TORCH_EXPECT(v.size() == 9, op, "layout", "9 numbers, got ", v.size());
  Layout layout = {{v[0], v[1], v[2], v[3], v[4], to_int32(op, "layout", v[5])}, {v[6], v[7], v[8]}};
  check(validate(op, layout.shape));
  for (int64_t words : layout.plan_words)
    SBNET_TORCH_EXPECT(words >= 0 && words < (int64_t{1} << 40), op, "layout", "a plan of fewer than 2^40 words, got ",
                       words);
  return layout;
}

struct Tables {
  BlockLayoutView view;
  const int32_t* plan;
  int64_t plan_words;
};

Tables to_tables(const Call& call, const Tensor& tables, const Layout& layout, MatmulPass pass) {
  const int64_t own = block_layout_words(layout.shape);
  int64_t words = own, before = own;
  for (int i = 0; i < 3; ++i) {
    words += layout.plan_words[i];
    if (i < static_cast<int>(pass)) before += layout.plan_words[i];
  }
  const int32_t* data = call.int32("tables", tables, words);
  const int64_t of_pass = layout.plan_words[static_cast<int>(pass)];
  return {block_layout_view(layout.shape, data), of_pass ? data + before : nullptr, of_pass};
}

// A matrix [M, F] of any strides as [1, F, 1, M].
TensorView matrix(const char* op, const char* argument, const Tensor& t) {
  check_rank(op, argument, t, 2);
  return {address_of(t.data_ptr()),
          {1, t.size(1), 1, t.size(0)},
          {0, t.stride(1), 0, t.stride(0)},
          to_dtype(op, argument, t)};
}

// Rows next to each other, features not: what feature_axis=0 gives. Keep in step with is_feature_major in
// sbnet/ops/weights/matmul.py.
bool is_feature_major(const Tensor& t) { return t.stride(0) == 1 && t.stride(1) != 1; }

Tensor empty_matrix(const Tensor& like, int64_t rows, int64_t features, bool feature_major) {
  const int64_t size[2] = {feature_major ? features : rows, feature_major ? rows : features};
  const Tensor t = torch::stable::new_empty(like, {size, 2});
  return feature_major ? torch::stable::transpose(t, 0, 1) : t;
}

// Weights and what goes with each block: of the layout's size, x's dtype and device, contiguous.
Tensor blocks_of(const Call& call, const Tensor& x, const Tensor& weight, const BlockLayoutShape& shape) {
  call.same_device("weight", weight);
  const int64_t size = shape.block_size;
  SBNET_TORCH_EXPECT(
      weight.dim() == 3 && weight.size(0) == shape.blocks && weight.size(1) == size && weight.size(2) == size,
      call.op(), "weight", "[", shape.blocks, ", ", size, ", ", size, "], got ", weight.numel(), " elements in ",
      weight.dim(), " dimensions");
  SBNET_TORCH_EXPECT(weight.scalar_type() == x.scalar_type(), call.op(), "weight",
                     dtype_name(to_dtype(call.op(), "x", x)), ", the dtype of x, got ",
                     dtype_name(to_dtype(call.op(), "weight", weight)));
  return weight.is_contiguous() ? weight : torch::stable::contiguous(weight);
}

// The tables of a layout, on the CPU. `shape`: the first six numbers of a layout.
Tensor block_layout_tables(Tensor coords, Ints shape) {
  const char* op = "block_layout";
  const Call call(op, "coords", coords);
  SBNET_TORCH_EXPECT(shape.size() == 6, op, "shape", "6 numbers, got ", shape.size());
  shape.resize(9);
  const BlockLayoutShape s = to_layout(op, shape).shape;
  const int32_t* list = call.int32("coords", coords, 2 * s.blocks);
  const Tensor tables = empty_int32(coords, {block_layout_words(s)});
  check(make_block_layout(s, list, static_cast<int32_t*>(tables.data_ptr())));
  return tables;
}

// A plan of the Hopper kernels (0: forward, 1: input gradient, 2: weight gradient), on the CPU; may be empty.
Tensor blocksparse_plan(Tensor tables, Ints shape, int64_t pass) {
  const char* op = "blocksparse_plan";
  const Call call(op, "tables", tables);
  SBNET_TORCH_EXPECT(pass >= 0 && pass < 3, op, "pass", "0, 1 or 2, got ", pass);
  SBNET_TORCH_EXPECT(shape.size() == 6, op, "shape", "6 numbers, got ", shape.size());
  shape.resize(9);
  const BlockLayoutShape s = to_layout(op, shape).shape;
  // Made anew from its blocks: what a plan's builder reads must be in order.
  std::vector<int32_t> words(block_layout_words(s));
  check(make_block_layout(s, call.int32("tables", tables, block_layout_words(s)), words.data()));
  const BlockLayoutView view = block_layout_view(s, words.data());
  const Tensor plan = empty_int32(tables, {blocksparse_plan_words(view, static_cast<MatmulPass>(pass))});
  if (plan.numel()) make_blocksparse_plan(view, static_cast<MatmulPass>(pass), static_cast<int32_t*>(plan.data_ptr()));
  return plan;
}

// What multiplies rows that are pixels or a matrix: weights, tables and the epilogue.
struct Factor {
  Tensor weight;
  std::optional<Tensor> gate, bias;
  Tensor tables;
  Ints layout;
  bool transposed;
  std::string activation;
  double activation_param;
  bool allow_tf32;
};

// p.x and p.active are there. Fills in the rest but y; `f` keeps the tensors that p points into.
void set_factor(const Call& call, const Tensor& x, Factor& f, BlocksparseMatmulParams& p) {
  const char* op = call.op();
  const Layout layout = to_layout(op, f.layout);
  const MatmulPass pass = f.transposed ? MatmulPass::kInputGradient : MatmulPass::kForward;
  const Tables found = to_tables(call, f.tables, layout, pass);
  p.layout = found.view;
  p.plan = found.plan;
  p.plan_words = found.plan_words;
  p.transposed = f.transposed;
  f.weight = blocks_of(call, x, f.weight, layout.shape);
  p.weight = address_of(f.weight.const_data_ptr());
  if (f.gate) {
    f.gate = vector_of(call, "gate", *f.gate, layout.shape.blocks);
    SBNET_TORCH_EXPECT(f.gate->scalar_type() == ScalarType::Float, op, "gate", "float32, got ",
                       dtype_name(to_dtype(op, "gate", *f.gate)));
    p.gate = static_cast<const float*>(address_of(f.gate->const_data_ptr()));
  }
  if (f.bias) {
    f.bias = vector_of(call, "bias", *f.bias, p.out_features());
    p.bias = address_of(f.bias->const_data_ptr());
    p.bias_dtype = to_dtype(op, "bias", *f.bias);
  }
  set_activation(op, f, &p);
  p.allow_tf32 = f.allow_tf32;
}

void multiply(const Call& call, const Tensor& x, const BlocksparseMatmulParams& p) {
  check(validate(p));
  const Tensor scratch = workspace(x, SBNET_KERNELS(blocksparse_matmul_workspace_bytes).bytes(call, &p));
  check(SBNET_KERNELS(blocksparse_matmul)(call, &p, scratch.data_ptr()));
}

Tensor blocksparse_matmul(Tensor x, Tensor weight, std::optional<Tensor> gate, std::optional<Tensor> bias,
                          Tensor tables, Ints layout, bool transposed, std::string activation, double activation_param,
                          bool allow_tf32) {
  const char* op = "blocksparse_matmul";
  const Call call(op, "x", x);
  Factor factor = {weight, gate, bias, tables, layout, transposed, activation, activation_param, allow_tf32};
  BlocksparseMatmulParams p = {};
  p.x = matrix(op, "x", x);
  set_factor(call, x, factor, p);
  const Tensor y = empty_matrix(x, x.size(0), p.out_features(), is_feature_major(x));
  p.y = matrix(op, "out", y);
  multiply(call, x, p);
  return y;
}

// Zeros outside the active blocks; y has the memory format of x.
Tensor blocksparse_conv1x1(Tensor x, Tensor weight, std::optional<Tensor> gate, std::optional<Tensor> bias,
                           Tensor tables, Ints layout, Tensor indices, Tensor count, Tensor block_map, Ints grid,
                           std::string activation, double activation_param, bool allow_tf32) {
  const char* op = "blocksparse_conv1x1";
  const Call call(op, "x", x);
  Factor factor = {weight, gate, bias, tables, layout, false, activation, activation_param, allow_tf32};
  BlocksparseMatmulParams p = {};
  p.x = view4(op, "x", x);
  check_batch(op, block_map, x);
  p.active = to_active(call, indices, count, nullptr, grid, x.size(0));
  check(check_grid(op, p.active.grid));  // before y is made, whose size these numbers decide
  check(check_tiling(op, p.active.grid, x.size(2), x.size(3)));
  set_factor(call, x, factor, p);
  const Tensor y = zeros4(x, {x.size(0), p.out_features(), x.size(2), x.size(3)}, is_channels_last(x));
  p.y = view4(op, "out", y);
  multiply(call, x, p);
  return y;
}

Tensor blocksparse_weight_grad(std::vector<Tensor> x, std::vector<Tensor> dy, Tensor tables, Ints layout_numbers,
                               bool allow_tf32, bool float32) {
  const char* op = "blocksparse_weight_grad";
  SBNET_TORCH_EXPECT(x.size() == dy.size() && x.size() >= 1 && x.size() <= kMaxWeightGradPairs, op, "pairs", "1 to ",
                     kMaxWeightGradPairs, " of x and dy, got ", x.size(), " and ", dy.size());
  const Call call(op, "x", x[0]);
  const Layout layout = to_layout(op, layout_numbers);
  const Tables found = to_tables(call, tables, layout, MatmulPass::kWeightGradient);
  BlocksparseWeightGradParams p = {};
  p.pairs = static_cast<int32_t>(x.size());
  for (int i = 0; i < p.pairs; ++i) {
    call.same_device("x", x[i]);
    call.same_device("dy", dy[i]);
    p.x[i] = matrix(op, "x", x[i]);
    p.dy[i] = matrix(op, "dy", dy[i]);
  }
  p.layout = found.view;
  p.plan = found.plan;
  p.plan_words = found.plan_words;
  p.allow_tf32 = allow_tf32;
  const int64_t size = layout.shape.block_size, blocks[3] = {layout.shape.blocks, size, size};
  const ScalarType dtype = float32 ? ScalarType::Float : x[0].scalar_type();
  const Tensor dw = torch::stable::new_empty(x[0], {blocks, 3}, dtype);
  p.dw = address_of(dw.data_ptr());
  p.dw_dtype = to_dtype(op, "out", dw);
  check(validate(p));
  const Tensor scratch = workspace(x[0], SBNET_KERNELS(blocksparse_weight_grad_workspace_bytes).bytes(call, &p));
  check(SBNET_KERNELS(blocksparse_weight_grad)(call, &p, scratch.data_ptr()));
  return dw;
}

SBNET_TORCH_OPS(ops) {
  // `layout` is block rows, block columns, blocks, in_features, out_features, block_size, and the words of three plans;
  // `shape` its first six numbers. Matrices are [rows, features].
  ops.add_of_cpu("block_layout_tables(Tensor coords, SymInt[] shape) -> Tensor", TORCH_BOX(&block_layout_tables));
  ops.add_of_cpu("blocksparse_plan(Tensor tables, SymInt[] shape, int purpose) -> Tensor",
                 TORCH_BOX(&blocksparse_plan));
  ops.add(
      "blocksparse_matmul(Tensor x, Tensor weight, Tensor? gate, Tensor? bias, Tensor tables, SymInt[] layout, bool "
      "transposed, str activation, float activation_param, bool allow_tf32) -> Tensor",
      TORCH_BOX(&blocksparse_matmul));
  ops.add(
      "blocksparse_conv1x1(Tensor x, Tensor weight, Tensor? gate, Tensor? bias, Tensor tables, SymInt[] layout, Tensor "
      "indices, Tensor count, Tensor block_map, SymInt[] grid, str activation, float activation_param, bool "
      "allow_tf32) -> Tensor",
      TORCH_BOX(&blocksparse_conv1x1));
  ops.add(
      "blocksparse_weight_grad(Tensor[] x, Tensor[] dy, Tensor tables, SymInt[] layout, bool allow_tf32, bool float32) "
      "-> Tensor",
      TORCH_BOX(&blocksparse_weight_grad));
}

}  // namespace
}  // namespace sbnet::binding
