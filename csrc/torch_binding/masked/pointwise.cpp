#include "core/masked/pointwise.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using Others = const std::optional<Tensor> (&)[kOperands];
using Other = std::optional<Tensor>;

void run(const LayerCall& layer, Others others, const std::string& program) {
  PointwiseParams p = {};
  check(read_program(layer.op, program.c_str(), &p));
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  for (int k = 0; k < kOperands; ++k) {
    if (!others[k]) continue;
    const char name[2] = {static_cast<char>('a' + k), 0};
    call.same_device(name, *others[k]);
    p.other[k] = view4(layer.op, name, *others[k]);
    broadcast(p.y, &p.other[k]);
  }
  const auto kernel = [=](void*, const Parallel& parallel) { return sbnet_sparse_pointwise_cpu(&p, &parallel); };
  check(layer.op,
        SBNET_ON_DEVICE(call, run_on_cpu(layer.op, nullptr, kernel, layer, others[0], others[1], others[2], others[3]),
                        sbnet_sparse_pointwise_cuda(&p, call.stream())));
}

Tensor sparse_pointwise(Tensor x, Other a, Other b, Other c, Other d, Tensor indices, Tensor count, Tensor block_map,
                        Ints grid, std::string program) {
  const char* op = "sparse_pointwise";
  check_rank(op, "x", x, 4);
  const Tensor y = zeros_for(op, x, x.size(1), {x.size(2), x.size(3)}, block_map, grid);
  run({op, x, indices, count, grid, y}, {a, b, c, d}, program);
  return y;
}

void sparse_pointwise_(Tensor x, Other a, Other b, Other c, Other d, Tensor indices, Tensor count, Ints grid,
                       std::string program, Tensor out, Other fringe_pixels, Other fringe_count) {
  run({"sparse_pointwise_", x, indices, count, grid, out, fringe_pixels, fringe_count}, {a, b, c, d}, program);
}

void list_ops(OpList& ops) {
  // `program`: steps, see core/masked/pointwise.h. Sides of 1 of a, b, c and d stand for those of x.
  ops.add(
      "sparse_pointwise(Tensor x, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor indices, Tensor count, Tensor "
      "block_map, SymInt[] grid, str program) -> Tensor",
      TORCH_BOX(&sparse_pointwise));
  ops.add(
      "sparse_pointwise_(Tensor x, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor indices, Tensor count, SymInt[] "
      "grid, str program, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_pointwise_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_OPS(sbnet::binding::list_ops)
