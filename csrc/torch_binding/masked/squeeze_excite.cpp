#include "core/masked/squeeze_excite.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// A matrix [rows, columns], packed.
Tensor matrix(const Call& call, const char* argument, const Tensor& weight, const Tensor& x, int64_t rows,
              int64_t columns) {
  call.same_device(argument, weight);
  check_rank(call.op(), argument, weight, 2);
  SBNET_TORCH_EXPECT(weight.size(0) == rows && weight.size(1) == columns && weight.scalar_type() == x.scalar_type(),
                     call.op(), argument, "[", rows, ",", columns, "] of x's dtype, got [", weight.size(0), ",",
                     weight.size(1), "] of ", dtype_name(to_dtype(call.op(), argument, weight)));
  return weight.is_contiguous() ? weight : torch::stable::contiguous(weight);
}

// The gate; `out`, if given, becomes x times it.
Tensor run(const char* op, const Tensor& x, Tensor weight1, Tensor weight2, std::optional<Tensor> bias1,
           std::optional<Tensor> bias2, const Tensor& block_map, Ints grid, const std::string& activation,
           const std::string& gate, const Tensor* out) {
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  check_rank(op, "weight1", weight1, 2);
  SqueezeExciteParams p = {};
  p.x = view4(op, "x", x);
  p.hidden = weight1.size(0);
  weight1 = matrix(call, "weight1", weight1, x, p.hidden, x.size(1));
  weight2 = matrix(call, "weight2", weight2, x, x.size(1), p.hidden);
  p.weight1 = weight1.const_data_ptr(), p.weight2 = weight2.const_data_ptr();
  DType dtypes[2] = {p.x.dtype, p.x.dtype};
  p.bias1 = bias_of(call, "bias1", bias1, p.hidden, &dtypes[0]);
  p.bias2 = bias_of(call, "bias2", bias2, x.size(1), &dtypes[1]);
  SBNET_TORCH_EXPECT(!bias1 || !bias2 || dtypes[0] == dtypes[1], op, "bias2: dtype", "that of bias1, ",
                     dtype_name(dtypes[0]), ", got ", dtype_name(dtypes[1]));
  p.bias_dtype = dtypes[bias1 ? 0 : 1];
  check(read_gate_step(op, "activation", activation.c_str(), &p.activation));
  check(read_gate_step(op, "gate", gate.c_str(), &p.gate));
  p.grid = to_grid(op, grid);
  check(check_grid(op, p.grid));
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, x.size(0)));
  // Channels last, whose strides a size of 1 x 1 says in either format.
  const Tensor y = empty4(x, {x.size(0), x.size(1), 1, 1}, true);
  p.y = view4(op, "out", y);
  if (out) {
    call.same_device("out", *out);
    check_rank(op, "out", *out, 4);
    p.scaled = view4(op, "out", *out);
  }
  check(op, validate(p));
  const Tensor scratch = workspace(x, sbnet_sparse_squeeze_excite2d_workspace_bytes(&p));
  check(op, SBNET_KERNELS(sparse_squeeze_excite2d)(call, &p, scratch.mutable_data_ptr()));
  return y;
}

Tensor sparse_squeeze_excite2d(Tensor x, Tensor weight1, Tensor weight2, std::optional<Tensor> bias1,
                               std::optional<Tensor> bias2, Tensor block_map, Ints grid, std::string activation,
                               std::string gate) {
  return run("sparse_squeeze_excite2d", x, weight1, weight2, bias1, bias2, block_map, grid, activation, gate, nullptr);
}
void sparse_squeeze_excite2d_(Tensor x, Tensor weight1, Tensor weight2, std::optional<Tensor> bias1,
                              std::optional<Tensor> bias2, Tensor block_map, Ints grid, std::string activation,
                              std::string gate, Tensor out) {
  run("sparse_squeeze_excite2d_", x, weight1, weight2, bias1, bias2, block_map, grid, activation, gate, &out);
}

SBNET_TORCH_OPS(ops) {
  // Blocks of x's plane.
  ops.add(
      "sparse_squeeze_excite2d(Tensor x, Tensor weight1, Tensor weight2, Tensor? bias1, Tensor? bias2, Tensor "
      "block_map, SymInt[] grid, str activation, str gate) -> Tensor",
      TORCH_BOX(&sparse_squeeze_excite2d));
  // out = x times the gate on the active blocks.
  ops.add(
      "sparse_squeeze_excite2d_(Tensor x, Tensor weight1, Tensor weight2, Tensor? bias1, Tensor? bias2, Tensor "
      "block_map, SymInt[] grid, str activation, str gate, Tensor(a!) out) -> ()",
      TORCH_BOX(&sparse_squeeze_excite2d_));
}

}  // namespace
}  // namespace sbnet::binding
