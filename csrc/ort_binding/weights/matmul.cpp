#include "core/weights/matmul.h"

#include "ort_binding/weights/tables.h"

namespace sbnet::ort {
namespace {

// The layout's, and on CUDA the plan of its products behind them.
std::vector<int32_t> tables_of(const Context& c, const BlockLayoutShape& shape, const int32_t* coords,
                               MatmulPass pass) {
  std::vector<int32_t> words(static_cast<size_t>(block_layout_words(shape)));
  check(make_block_layout(shape, coords, words.data()));
  if (!c.cuda()) return words;
  const BlockLayoutView view = block_layout_view(shape, words.data());
  std::vector<int32_t> plan(static_cast<size_t>(blocksparse_plan_words(view, pass)));
  if (!plan.empty()) make_blocksparse_plan(view, pass, plan.data());
  words.insert(words.end(), plan.begin(), plan.end());
  return words;
}

// The layout of `blocks` square blocks, checked.
BlockLayoutShape shape_of(const char* op, int64_t in_features, int64_t out_features, int64_t blocks, int64_t size) {
  const BlockLayoutShape shape = {
      (in_features + size - 1) / size, (out_features + size - 1) / size, blocks, in_features, out_features,
      static_cast<int32_t>(size)};
  check(validate(op, shape));
  return shape;
}

// [..., features] as [1, features, 1, rows].
TensorView matrix(const Tensor& t, int64_t features) {
  return {const_cast<void*>(t.data), {1, features, 1, t.elements() / features}, {0, 1, 0, features}, t.dtype};
}

struct BlocksparseMatmul {
  static constexpr const char* kName = "blocksparse_matmul";
  enum Position { kX, kWeight, kCoords, kBiasInput, kGate };
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"weight", kT},
                                         {"coords", kInt32, kRequired, kCpuInput},
                                         {"bias", kBias, kOptional},
                                         {"gate", kFloat, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kBiasTypes;
  static constexpr int kInPlace = -1;

  int64_t in_features, out_features;
  bool transposed, allow_tf32;
  Activation activation;
  float negative_slope;
  bool constant_coords;
  std::shared_ptr<Tables> constant_tables = std::make_shared<Tables>();

  explicit BlocksparseMatmul(const Attributes& a)
      : in_features(a.required_integer("in_features")),
        out_features(a.required_integer("out_features")),
        transposed(a.flag("transposed", false)),
        allow_tf32(a.flag("allow_tf32", false)),
        activation(to_activation(kName, a.text("activation", "none"))),
        negative_slope(a.real("negative_slope", 0.01f)),
        constant_coords(a.is_constant(kCoords)) {
    if (in_features < 1 || out_features < 1)
      raise_expected(kName, "in_features, out_features", "1 or more, got ", in_features, " and ", out_features);
  }

  int64_t outputs() const { return transposed ? in_features : out_features; }

  void infer(ShapeContext& s) const {
    Dims y = s.input(kX);
    s.input(kWeight, 3);
    s.input(kCoords, 2);
    if (y.empty()) return;
    y.back() = outputs();
    s.output(0, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX), weight = c.input(kWeight, 3), coords = c.input(kCoords, 2),
                 bias = c.input(kBiasInput, 1), gate = c.input(kGate, 1);
    const int64_t inputs = transposed ? out_features : in_features, size = weight.shape[1];
    if (x.shape.empty() || x.shape.back() != inputs)
      raise_expected(kName, "x", inputs, " features last, got ", x.shape.empty() ? int64_t{0} : x.shape.back());
    if (weight.shape[2] != size || !is_weight_block_size(size))
      raise_expected(kName, "weight", "square blocks of 8, 16, 32, 64 or 128, got ", size, " x ", weight.shape[2]);
    const int64_t blocks = weight.shape[0];
    const BlockLayoutShape shape = shape_of(kName, in_features, out_features, blocks, size);
    const MatmulPass pass = transposed ? MatmulPass::kInputGradient : MatmulPass::kForward;
    Tables of_this_run;
    Tables& tables = constant_coords ? *constant_tables : of_this_run;
    const int32_t* at = c.int32(coords, {blocks, 2});
    const int32_t* words = tables.get(c, [&] { return tables_of(c, shape, at, pass); });
    BlocksparseMatmulParams p = {};
    p.layout = block_layout_view(shape, words);
    const int64_t own = block_layout_words(shape);
    p.plan_words = static_cast<int64_t>(tables.host().size()) - own;
    if (p.plan_words > 0) p.plan = words + own;
    p.transposed = transposed;
    p.weight = weight.data;
    set_bias(c, bias, outputs(), &p);
    if (gate.present) {
      if (gate.shape[0] != blocks) raise_expected(kName, "gate", blocks, " elements, got ", gate.shape[0]);
      p.gate = static_cast<const float*>(gate.data);
    }
    p.activation = activation;
    p.activation_param = negative_slope;
    p.allow_tf32 = allow_tf32;
    p.x = matrix(x, inputs);
    p.y = {nullptr, {1, outputs(), 1, p.x.size[3]}, {0, 1, 0, outputs()}, x.dtype};
    check(validate(p));  // before an output of an absurd size is asked for
    std::vector<int64_t> y = x.shape;
    y.back() = outputs();
    p.y.data = c.output(0, y);
    const int64_t bytes = SBNET_KERNELS(blocksparse_matmul_workspace_bytes).bytes(c, &p);
    run(c, SBNET_KERNELS(blocksparse_matmul), p, bytes);
  }
};

struct BlocksparseWeightGrad {
  static constexpr const char* kName = "blocksparse_weight_grad";
  enum Position { kX, kDy, kCoords };
  static constexpr Argument kInputs[] = {{"x", kT}, {"dy", kT}, {"coords", kInt32, kRequired, kCpuInput}};
  static constexpr Argument kOutputs[] = {{"dw", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  int64_t block_size;
  bool allow_tf32, constant_coords;
  std::shared_ptr<Tables> constant_tables = std::make_shared<Tables>();

  explicit BlocksparseWeightGrad(const Attributes& a)
      : block_size(a.required_integer("block_size")),
        allow_tf32(a.flag("allow_tf32", false)),
        constant_coords(a.is_constant(kCoords)) {}

  // Not when it is made: the library makes one to tell which attributes it reads.
  void check_size() const {
    if (!is_weight_block_size(block_size))
      raise_expected(kName, "block_size", "8, 16, 32, 64 or 128, got ", block_size);
  }

  void infer(ShapeContext& s) const {
    check_size();
    s.input(kX);
    s.input(kDy);
    const Dims coords = s.input(kCoords, 2);
    s.output(0, {coords.empty() ? Dim{} : coords[0], block_size, block_size});
  }

  void compute(Context& c) const {
    check_size();
    const Tensor x = c.input(kX), dy = c.input(kDy), coords = c.input(kCoords, 2);
    if (x.shape.empty() || dy.shape.empty() || x.shape.back() < 1 || dy.shape.back() < 1)
      raise_expected(kName, "x, dy", "one dimension or more, of at least one feature, got ", x.shape.size(), " and ",
                     dy.shape.size(), " dimensions");
    const int64_t blocks = coords.shape[0];
    const BlockLayoutShape shape = shape_of(kName, x.shape.back(), dy.shape.back(), blocks, block_size);
    Tables of_this_run;
    Tables& tables = constant_coords ? *constant_tables : of_this_run;
    const int32_t* at = c.int32(coords, {blocks, 2});
    const int32_t* words = tables.get(c, [&] { return tables_of(c, shape, at, MatmulPass::kWeightGradient); });
    BlocksparseWeightGradParams p = {};
    p.pairs = 1;
    p.x[0] = matrix(x, x.shape.back());
    p.dy[0] = matrix(dy, dy.shape.back());
    p.layout = block_layout_view(shape, words);
    const int64_t own = block_layout_words(shape);
    p.plan_words = static_cast<int64_t>(tables.host().size()) - own;
    if (p.plan_words > 0) p.plan = words + own;
    p.dw_dtype = x.dtype;
    p.allow_tf32 = allow_tf32;
    p.dw = c.output(0, {blocks, block_size, block_size});
    check(validate(p));
    const int64_t bytes = SBNET_KERNELS(blocksparse_weight_grad_workspace_bytes).bytes(c, &p);
    run(c, SBNET_KERNELS(blocksparse_weight_grad), p, bytes);
  }
};

}  // namespace

SBNET_ORT_OPS(BlocksparseMatmul, BlocksparseWeightGrad)

}  // namespace sbnet::ort
