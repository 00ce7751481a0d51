#include "core/frames/yuv_to_rgb.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const YuvToRgbParams& p) {
  constexpr const char* kOp = "yuv_to_rgb";
  SBNET_CHECK(p.height >= 2 && p.width >= 2 && p.height % 2 == 0 && p.width % 2 == 0 && p.height <= INT32_MAX / 4 &&
                  p.width <= INT32_MAX / 4,
              "%s: planes: expected luma of even sides, 2 to 2^29, got %lldx%lld", kOp,
              static_cast<long long>(p.height), static_cast<long long>(p.width));
  SBNET_TRY(check_plane(kOp, "rgb", p.rgb));
  SBNET_CHECK(is_compute_dtype(p.rgb.dtype) || p.rgb.dtype == DType::kU8,
              "%s: rgb: dtype: expected uint8, float16, bfloat16 or float32, got %s", kOp, dtype_name(p.rgb.dtype));
  SBNET_CHECK(p.rgb.size[0] == p.images && p.rgb.size[1] == 3, "%s: rgb: expected [%lld,3,H,W], got [%lld,%lld,H,W]",
              kOp, static_cast<long long>(p.images), static_cast<long long>(p.rgb.size[0]),
              static_cast<long long>(p.rgb.size[1]));
  SBNET_CHECK(p.rgb.size[2] >= p.picture(0) && p.rgb.size[3] >= p.picture(1),
              "%s: rgb: expected at least %lldx%lld pixels, got %lldx%lld", kOp, static_cast<long long>(p.picture(0)),
              static_cast<long long>(p.picture(1)), static_cast<long long>(p.rgb.size[2]),
              static_cast<long long>(p.rgb.size[3]));
  for (const int32_t factor : {p.luma, p.red, p.blue, p.green_u, p.green_v})
    SBNET_CHECK(factor > -(1 << 20) && factor < 1 << 20, "%s: look: expected factors of at most 20 bits, got %d", kOp,
                factor);
  SBNET_CHECK(p.black >= 0 && p.black <= 255, "%s: look: expected a level of black of 0 to 255, got %d", kOp, p.black);
  return ok_status();
}

}  // namespace sbnet
