#include "core/lists/motion_mask.h"

#include <algorithm>

#include "core/grid.h"

namespace sbnet {

Status validate(const MotionMaskParams& p) {
  constexpr const char* kOp = "motion_mask";
  SBNET_CHECK(is_compute_dtype(p.frame.dtype) || p.frame.dtype == DType::kU8,
              "%s: frame: expected uint8, float16, bfloat16 or float32, got %s", kOp, dtype_name(p.frame.dtype));
  SBNET_TRY(check_plane(kOp, "frame", p.frame));
  SBNET_CHECK(p.frame.size[1] >= 1, "%s: frame: expected at least one channel, got none", kOp);
  SBNET_CHECK(size_product({p.images(), p.pixels()}) <= INT64_MAX / 256,
              "%s: frame: expected fewer than 2^55 pixels, got more", kOp);
  SBNET_CHECK(p.smooth >= 1 && p.smooth <= kMostSmooth && p.smooth % 2 == 1,
              "%s: smooth: expected an odd number of pixels, 1 to %d, got %lld", kOp, kMostSmooth,
              static_cast<long long>(p.smooth));
  SBNET_CHECK(p.rate > 0 && p.rate <= 1, "%s: rate: expected more than 0 and at most 1, got %g", kOp, p.rate);
  SBNET_CHECK(p.threshold == p.threshold && p.cut == p.cut, "%s: %s: expected a number, got NaN", kOp,
              p.cut == p.cut ? "threshold" : "cut");
  return ok_status();
}

int64_t motion_tiles(const MotionMaskParams& p) {
  const auto tiles = [&](int d) { return (p.frame.size[d] + kMotionTile - 1) / kMotionTile; };
  return size_product({tiles(2), tiles(3)});
}

}  // namespace sbnet

// Sums of differences, of rows on a CPU and of tiles on CUDA, then brightnesses: on CUDA of each pixel, averaged, on a
// CPU of a band and what boxes reach of it, for each range of rows.
int64_t sbnet_motion_mask_workspace_bytes(const sbnet::MotionMaskParams* p) {
  const int64_t sums = p->images() * std::max(p->frame.size[2], sbnet::motion_tiles(*p)) + 1;  // made even
  const int64_t ranges = p->images() * p->frame.size[2] / sbnet::kMotionRange + 1;
  const int64_t bands = ranges * (sbnet::kMotionBand + p->smooth) * p->frame.size[3];
  return sums * 8 + std::max(p->images() * p->pixels(), bands) * 4;
}
