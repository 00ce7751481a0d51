#include "core/lists/fringe.h"

#include "core/grid.h"

namespace sbnet {

Status check_listable(const char* op, int64_t batch, int64_t height, int64_t width) {
  SBNET_CHECK(batch >= 0 && height >= 1 && width >= 1 && height <= (1 << 29) && width <= (1 << 29),
              "%s: size: expected a batch of 0 or more and sides of 1 to 2^29, got %lld of %lldx%lld", op,
              static_cast<long long>(batch), static_cast<long long>(height), static_cast<long long>(width));
  SBNET_CHECK(height * width <= INT32_MAX && batch <= INT32_MAX / (height * width),
              "%s: size: expected fewer than 2^31 pixels, got %lld planes of %lldx%lld", op,
              static_cast<long long>(batch), static_cast<long long>(height), static_cast<long long>(width));
  SBNET_CHECK(batch * height <= (1 << 30), "%s: size: expected at most 2^30 rows, got %lld planes of %lld", op,
              static_cast<long long>(batch), static_cast<long long>(height));
  return ok_status();
}

Status validate(const FringeParams& p) {
  constexpr const char* kOp = "fringe";
  SBNET_TRY(check_listable(kOp, p.batch, p.height, p.width));
  const int64_t size[2] = {p.height, p.width}, out_size[2] = {p.out_height, p.out_width};
  SBNET_TRY(check_window(kOp, p.window, size, out_size));
  SBNET_TRY(check_active(kOp, p.producer));
  SBNET_TRY(check_active(kOp, p.consumer));
  SBNET_TRY(check_tiling(kOp, p.producer.grid, p.height, p.width));
  SBNET_TRY(check_tiling(kOp, p.consumer.grid, p.out_height, p.out_width));
  SBNET_CHECK(p.batch == 0 || (p.producer.block_map && p.consumer.block_map),
              "%s: active: expected block maps, got none", kOp);
  SBNET_CHECK(p.capacity >= 0 && p.capacity <= INT32_MAX, "%s: capacity: expected 0 to 2^31 - 1, got %lld", kOp,
              static_cast<long long>(p.capacity));
  return ok_status();
}

}  // namespace sbnet

// The words of the plane, then (CUDA) a count for each 32 of them.
int64_t sbnet_fringe_workspace_bytes(const sbnet::FringeParams* p) {
  const int64_t words = p->batch * p->height * ((p->width + 31) / 32);
  return (words + words / 32 + 1) * 4;
}
