#include "core/masked/resize.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

void run(const LayerCall& layer, const std::string& mode, bool align_corners, double ratio_h, double ratio_w) {
  ResizeParams p = {};
  check(read_resize_mode(layer.op, mode.c_str(), &p.mode));
  p.align_corners = align_corners;
  p.ratio[0] = static_cast<float>(ratio_h), p.ratio[1] = static_cast<float>(ratio_w);
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  const auto kernel = [=](void*, const Parallel& parallel) { return sbnet_sparse_resize2d_cpu(&p, &parallel); };
  check(layer.op, SBNET_ON_DEVICE(call, run_on_cpu(layer.op, nullptr, kernel, layer),
                                  sbnet_sparse_resize2d_cuda(&p, call.stream())));
}

Tensor sparse_resize2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, Ints grid, Ints size, std::string mode,
                       bool align_corners, double ratio_h, double ratio_w) {
  const char* op = "sparse_resize2d";
  check_rank(op, "x", x, 4);
  int32_t side[2];
  to_pair(op, "size", size, side);
  SBNET_TORCH_CHECK(side[0] >= 1 && side[1] >= 1, "sbnet::", op, ": size: expected at least 1, got ", side[0], ", ",
                    side[1]);
  const Tensor y = zeros_for(op, x, x.size(1), {side[0], side[1]}, block_map, grid);
  run({op, x, indices, count, grid, y}, mode, align_corners, ratio_h, ratio_w);
  return y;
}

void sparse_resize2d_(Tensor x, Tensor indices, Tensor count, Ints grid, std::string mode, bool align_corners,
                      double ratio_h, double ratio_w, Tensor out, std::optional<Tensor> fringe_pixels,
                      std::optional<Tensor> fringe_count) {
  run({"sparse_resize2d_", x, indices, count, grid, out, fringe_pixels, fringe_count}, mode, align_corners, ratio_h,
      ratio_w);
}

void list_ops(OpList& ops) {
  // `ratio`: pixels of x from an output to the next, 0 where the sizes say it.
  ops.add(
      "sparse_resize2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] output_size, "
      "str method, bool align_corners, float ratio_h, float ratio_w) -> Tensor",
      TORCH_BOX(&sparse_resize2d));
  ops.add(
      "sparse_resize2d_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, str method, bool align_corners, float "
      "ratio_h, float ratio_w, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_resize2d_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_OPS(sbnet::binding::list_ops)
