#include "core/frames/components.h"

#include <tuple>

#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> connected_components(Tensor scores, double least, int64_t smallest,
                                                                int64_t capacity) {
  const char* op = "connected_components";
  const Call call(op, "scores", scores);
  check_rank(op, "scores", scores, 3);
  ComponentsParams p = {};
  p.scores = {address_of(scores.data_ptr()),
              {scores.size(0), 1, scores.size(1), scores.size(2)},
              {scores.stride(0), 0, scores.stride(1), scores.stride(2)},
              to_dtype(op, "scores", scores)};
  p.least = static_cast<float>(least), p.smallest = smallest, p.capacity = capacity;
  check(validate(p));
  const int64_t images = p.images();
  Tensor boxes = empty_int32(scores, {images, capacity, 4}), pixels = empty_int32(scores, {images, capacity});
  const int64_t size[2] = {images, capacity};
  Tensor sums = torch::stable::new_empty(scores, {size, 2}, ScalarType::Long), count = empty_int32(scores, {images});
  p.boxes = static_cast<int32_t*>(boxes.data_ptr()), p.pixels = static_cast<int32_t*>(pixels.data_ptr());
  p.sums = static_cast<int64_t*>(sums.data_ptr()), p.count = static_cast<int32_t*>(count.data_ptr());
  const Tensor scratch = workspace(scores, sbnet_components_workspace_bytes(&p));
  check(SBNET_KERNELS(components)(call, &p, scratch.data_ptr()));
  return {boxes, pixels, sums, count};
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "connected_components(Tensor scores, float least, SymInt smallest, SymInt capacity) -> (Tensor boxes, Tensor "
      "pixels, Tensor sums, Tensor count)",
      TORCH_BOX(&connected_components));
}

}  // namespace
}  // namespace sbnet::binding
