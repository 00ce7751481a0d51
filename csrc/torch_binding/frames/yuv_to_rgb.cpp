#include "core/frames/yuv_to_rgb.h"

#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

constexpr size_t kNumbers = 10;  // of a look

void yuv_to_rgb_(Tensor planes, std::vector<int64_t> look, Tensor rgb) {
  const char* op = "yuv_to_rgb_";
  const Call call(op, "planes", planes);
  check_rank(op, "planes", planes, 3);
  SBNET_TORCH_EXPECT(planes.scalar_type() == ScalarType::Byte && planes.is_contiguous() && planes.size(1) % 3 == 0, op,
                     "planes", "contiguous uint8 [N,3H/2,W], got another tensor");
  call.same_device("rgb", rgb);
  SBNET_TORCH_EXPECT(look.size() == kNumbers, op, "look", kNumbers, " numbers, got ", look.size());
  YuvToRgbParams p = {};
  p.planes = static_cast<const uint8_t*>(address_of(planes.const_data_ptr()));
  p.images = planes.size(0), p.height = planes.size(1) / 3 * 2, p.width = planes.size(2);
  p.rgb = view4(op, "rgb", rgb);
  const bool dense = rgb.stride(1) == 1 && rgb.stride(3) == 3 && rgb.stride(2) == 3 * rgb.size(3) &&
                     (rgb.size(0) == 1 || rgb.stride(0) == 3 * rgb.size(2) * rgb.size(3));
  SBNET_TORCH_EXPECT(dense, op, "rgb", "a tensor in channels_last without gaps, got another one");
  int32_t* const numbers[] = {&p.luma, &p.red, &p.blue, &p.green_u, &p.green_v, &p.black};
  for (size_t k = 0; k < 6; ++k) *numbers[k] = to_int32(op, "look", look[k]);
  p.planar = look[6] != 0, p.turned = look[7] != 0, p.over = look[8] != 0, p.across = look[9] != 0;
  check(SBNET_KERNELS(yuv_to_rgb)(call, &p));
}

SBNET_TORCH_OPS(ops) {
  ops.add("yuv_to_rgb_(Tensor planes, SymInt[] look, Tensor(a!) rgb) -> ()", TORCH_BOX(&yuv_to_rgb_));
}

}  // namespace
}  // namespace sbnet::binding
