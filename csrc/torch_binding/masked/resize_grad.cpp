#include "core/masked/resize_grad.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

struct ResizeNumbers {
  const std::string& method;
  bool align_corners;
  double ratio_h, ratio_w;
};

// `out`: dx. `block_map`, `grid`: of grad's plane. p: with the list of dx's plane, where there is one.
void run(const Call& call, ResizeGradParams p, const Tensor& grad, const Tensor& block_map, const Ints& grid,
         const ResizeNumbers& n, const Tensor& out) {
  const char* op = call.op();
  call.same_device("out", out);
  p.x = view4(op, "grad", grad), p.y = view4(op, "out", out);
  p.read_grid = to_grid(op, grid);
  p.read_map = call.int32("block_map", block_map, blocks_of(p.read_grid, grad.size(0)));
  check(op, read_choice(op, "method", kResizeModes, n.method.c_str(), &p.mode));
  p.align_corners = n.align_corners;
  p.ratio[0] = static_cast<float>(n.ratio_h), p.ratio[1] = static_cast<float>(n.ratio_w);
  check(op, SBNET_KERNELS(sparse_resize2d_grad)(call, &p));
}

// dx of `size`, all of it.
Tensor sparse_resize2d_grad(Tensor grad, Tensor block_map, Ints grid, Ints size, std::string method, bool align_corners,
                            double ratio_h, double ratio_w, bool channels_last) {
  const char* op = "sparse_resize2d_grad";
  const Call call(op, "grad", grad);
  check_rank(op, "grad", grad, 4);
  SBNET_TORCH_EXPECT(size.size() == 2 && size[0] > 0 && size[1] > 0, op, "size", "two numbers above 0, got others");
  const Tensor dx = empty4(grad, {grad.size(0), grad.size(1), size[0], size[1]}, channels_last);
  run(call, {}, grad, block_map, grid, {method, align_corners, ratio_h, ratio_w}, dx);
  return dx;
}

// The same in the blocks of a list of x's plane.
void sparse_resize2d_grad_(Tensor grad, Tensor block_map, Ints grid, std::string method, bool align_corners,
                           double ratio_h, double ratio_w, Tensor indices, Tensor count, Ints x_grid, Tensor out,
                           std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count) {
  const char* op = "sparse_resize2d_grad_";
  const Call call(op, "grad", grad);
  check_rank(op, "grad", grad, 4);
  ResizeGradParams p = {};
  set_layer(call, {op, grad, indices, count, x_grid, out, fringe_pixels, fringe_count}, &p);
  run(call, p, grad, block_map, grid, {method, align_corners, ratio_h, ratio_w}, out);
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_resize2d_grad(Tensor grad, Tensor block_map, SymInt[] grid, SymInt[] size, str method, bool "
      "align_corners, "
      "float ratio_h, float ratio_w, bool channels_last) -> Tensor",
      TORCH_BOX(&sparse_resize2d_grad));
  ops.add(
      "sparse_resize2d_grad_(Tensor grad, Tensor block_map, SymInt[] grid, str method, bool align_corners, float "
      "ratio_h, "
      "float ratio_w, Tensor indices, Tensor count, SymInt[] x_grid, Tensor(a!) out, Tensor? fringe_pixels, Tensor? "
      "fringe_count) -> ()",
      TORCH_BOX(&sparse_resize2d_grad_));
}

}  // namespace
}  // namespace sbnet::binding
