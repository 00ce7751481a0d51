#include "core/masked/resize.h"

namespace sbnet {

constexpr const char* kOp = ResizeLayer::kName;
constexpr int64_t kMostSide = (1 << 24) - 1;

Status ResizeLayer::check(const ResizeParams& p) {
  for (const float ratio : p.ratio)
    SBNET_CHECK(ratio >= 0 && ratio < (1 << 24), "%s: scale_factor: expected 2^-24 at least, got 1 / %g", kOp,
                static_cast<double>(ratio));
  SBNET_CHECK(!p.align_corners || p.mode == ResizeMode::kBilinear || p.mode == ResizeMode::kBicubic,
              "%s: align_corners: expected false of the nearest modes, got true", kOp);
  return ok_status();
}

Status ResizeLayer::size(const ResizeParams& p, int d, int64_t x, int64_t* y) {
  *y = d == 1 ? x : p.y.size[d];
  if (d == 1) return ok_status();
  const double ratio = p.ratio[d - 2];
  if (!*y) {
    SBNET_CHECK(ratio > 0, "%s: size: expected it, or ratio_h and ratio_w above 0", kOp);
    // A float near the reciprocal of a scale: quotients that miss a whole number by its rounding are it.
    const double side = std::floor(static_cast<double>(x) / ratio * (1 + 0x1p-22));
    SBNET_CHECK(side <= kMostSide, "%s: ratio: expected sides below 2^24, got %g", kOp, side);
    *y = static_cast<int64_t>(side);
  }
  SBNET_CHECK(*y >= 1 && *y <= kMostSide && x <= kMostSide,
              "%s: size: expected sides of 1 to 2^24 - 1, got %lld from %lld", kOp, static_cast<long long>(*y),
              static_cast<long long>(x));
  return ok_status();
}

Status validate(const ResizeParams& p) { return check_plain<ResizeLayer>(p); }

}  // namespace sbnet
