#include "core/masked/norm.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using Parameter = std::optional<Tensor>;

void run(const LayerCall& layer, Parameter weight, Parameter bias, const std::string& mode, int64_t groups,
         double eps) {
  const char* op = layer.op;
  const Call call(op, "x", layer.x);
  NormParams p = {};
  check(read_norm_kind(op, mode.c_str(), &p.kind));
  set_layer(call, layer, &p);
  DType of_weight = p.x.dtype, of_bias = p.x.dtype;
  p.weight = bias_of(call, "weight", weight, p.x.size[1], &of_weight);
  p.bias = bias_of(call, "bias", bias, p.x.size[1], &of_bias);
  SBNET_TORCH_CHECK(!p.weight || !p.bias || of_weight == of_bias, "sbnet::", op,
                    ": bias: dtype: expected that of weight, ", dtype_name(of_weight), ", got ", dtype_name(of_bias));
  p.param_dtype = p.weight ? of_weight : of_bias;
  p.groups = to_int32(op, "groups", groups);
  p.eps = static_cast<float>(eps);
  check(op, validate(p));
  const Tensor scratch = workspace(layer.x, sbnet_sparse_norm2d_workspace_bytes(&p));
  const auto kernel = [=](void* own, const Parallel& parallel) { return sbnet_sparse_norm2d_cpu(&p, own, &parallel); };
  check(op, SBNET_ON_DEVICE(call, run_on_cpu(op, &scratch, kernel, layer, weight, bias),
                            sbnet_sparse_norm2d_cuda(&p, scratch.data_ptr(), call.stream())));
}

Tensor sparse_norm2d(Tensor x, Parameter weight, Parameter bias, Tensor indices, Tensor count, Tensor block_map,
                     Ints grid, std::string mode, int64_t groups, double eps) {
  const char* op = "sparse_norm2d";
  check_rank(op, "x", x, 4);
  const Tensor y = zeros_for(op, x, x.size(1), {x.size(2), x.size(3)}, block_map, grid);
  run({op, x, indices, count, grid, y, {}, {}, block_map}, weight, bias, mode, groups, eps);
  return y;
}

void sparse_norm2d_(Tensor x, Parameter weight, Parameter bias, Tensor indices, Tensor count, Tensor block_map,
                    Ints grid, std::string mode, int64_t groups, double eps, Tensor out,
                    std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count) {
  const char* op = "sparse_norm2d_";
  check_rank(op, "x", x, 4);
  run({op, x, indices, count, grid, out, fringe_pixels, fringe_count, block_map}, weight, bias, mode, groups, eps);
}

void list_ops(OpList& ops) {
  // `method`: group, layer, softmax or log_softmax, see core/masked/norm.h.
  ops.add(
      "sparse_norm2d(Tensor x, Tensor? weight, Tensor? bias, Tensor indices, Tensor count, Tensor block_map, SymInt[] "
      "grid, str method, int groups, float eps) -> Tensor",
      TORCH_BOX(&sparse_norm2d));
  ops.add(
      "sparse_norm2d_(Tensor x, Tensor? weight, Tensor? bias, Tensor indices, Tensor count, Tensor block_map, SymInt[] "
      "grid, str method, int groups, float eps, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_norm2d_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_OPS(sbnet::binding::list_ops)
