#include "core/lists/motion_mask.h"

#include <tuple>

#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

// Mask, after the background went into `next`.
Tensor run(const char* op, const Tensor& frame, const Tensor& background, const Tensor& next, double threshold,
           double rate, double cut, int64_t smooth) {
  const Call call(op, "frame", frame);
  MotionMaskParams p = {};
  p.frame = view4(op, "frame", frame);
  p.smooth = smooth;
  p.threshold = static_cast<float>(threshold), p.rate = static_cast<float>(rate), p.cut = static_cast<float>(cut);
  check(validate(p));
  const int64_t size[3] = {p.frame.size[0], p.frame.size[2], p.frame.size[3]};
  call.same_device("background", background);
  check_rank(op, "background", background, 3);
  const bool fits = background.size(0) == size[0] && background.size(1) == size[1] && background.size(2) == size[2];
  SBNET_TORCH_EXPECT(fits && background.is_contiguous() && background.scalar_type() == ScalarType::Float, op,
                     "background", "contiguous float32 [", size[0], ",", size[1], ",", size[2],
                     "], got another tensor");
  Tensor mask = torch::stable::new_empty(frame, {size, 3}, ScalarType::Bool);
  p.background = static_cast<const float*>(background.const_data_ptr());
  p.next = static_cast<float*>(next.data_ptr());
  p.mask = static_cast<uint8_t*>(mask.data_ptr());
  const Tensor scratch = workspace(frame, sbnet_motion_mask_workspace_bytes(&p));
  check(SBNET_KERNELS(motion_mask)(call, &p, scratch.data_ptr()));
  return mask;
}

std::tuple<Tensor, Tensor> motion_mask(Tensor frame, Tensor background, double threshold, double rate, double cut,
                                       int64_t smooth) {
  Tensor next = torch::stable::empty_like(background);
  Tensor mask = run("motion_mask", frame, background, next, threshold, rate, cut, smooth);
  return {mask, next};
}

Tensor motion_mask_(Tensor frame, Tensor background, double threshold, double rate, double cut, int64_t smooth) {
  return run("motion_mask_", frame, background, background, threshold, rate, cut, smooth);
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "motion_mask(Tensor frame, Tensor background, float threshold, float rate, float cut, SymInt smooth) -> (Tensor "
      "mask, Tensor next)",
      TORCH_BOX(&motion_mask));
  ops.add(
      "motion_mask_(Tensor frame, Tensor(a!) background, float threshold, float rate, float cut, SymInt smooth) -> "
      "Tensor",
      TORCH_BOX(&motion_mask_));
}

}  // namespace
}  // namespace sbnet::binding
