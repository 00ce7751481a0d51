#include "core/lists/motion_mask.h"

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct MotionMask {
  static constexpr const char* kName = "motion_mask";
  static constexpr Argument kInputs[] = {{"frame", kT}, {"background", kFloat}};
  static constexpr Argument kOutputs[] = {{"mask", kBool}, {"next", kFloat}};
  static constexpr Types kTypes[] = {{kUInt8, kUInt8}, {kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}};
  static constexpr int kInPlace = -1;

  float threshold, rate, cut;
  int64_t smooth;

  explicit MotionMask(const Attributes& a)
      : threshold(a.real("threshold", 0.08f)),
        rate(a.real("rate", 0.5f)),
        cut(a.real("cut", 0.15f)),
        smooth(a.integer("smooth", 5)) {
    MotionMaskParams p = {};
    p.frame.size[1] = 1;
    check(validate(with_numbers(p)));
  }

  MotionMaskParams with_numbers(MotionMaskParams p) const {
    p.threshold = threshold, p.rate = rate, p.cut = cut, p.smooth = smooth;
    return p;
  }

  void infer(ShapeContext& s) const {
    const Dims background = s.input(1, 3);
    const Dims size = background.empty() ? Dims(3) : background;
    s.output(0, size);
    s.output(1, size);
  }

  void compute(Context& c) const {
    const Tensor frame = c.input(0, 4), background = c.input(1, 3);
    MotionMaskParams p = {};
    p.frame = plane_view(frame);
    p = with_numbers(p);
    check(validate(p));
    const std::vector<int64_t> size = {frame.shape[0], frame.shape[1], frame.shape[2]};
    if (background.shape != size)
      raise_expected(kName, "background", "[", size[0], ",", size[1], ",", size[2], "], got [", background.shape[0],
                     ",", background.shape[1], ",", background.shape[2], "]");
    p.background = static_cast<const float*>(background.data);
    p.mask = static_cast<uint8_t*>(c.output(0, size));
    p.next = static_cast<float*>(c.output(1, size));
    run(c, SBNET_KERNELS(motion_mask), p, sbnet_motion_mask_workspace_bytes(&p));
  }
};

}  // namespace

SBNET_ORT_OPS(MotionMask)

}  // namespace sbnet::ort
