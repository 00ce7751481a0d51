#include "core/lists/reduce_mask.h"

#include <algorithm>

#include "core/grid.h"

namespace sbnet {

Status check_mask(const char* op, DType dtype, const int64_t size[3], const int64_t stride[3]) {
  const bool known = is_compute_dtype(dtype) || dtype == DType::kF64 || dtype == DType::kBool || dtype == DType::kU8;
  SBNET_CHECK(known, "%s: mask: dtype: expected bool, uint8, float16, bfloat16, float32 or float64, got %s", op,
              dtype_name(dtype));
  return check_plane(op, "mask",
                     {nullptr, {size[0], 1, size[1], size[2]}, {stride[0], 1, stride[1], stride[2]}, dtype});
}

Status validate(const ReduceMaskParams& p) {
  constexpr const char* kOp = "reduce_mask";
  SBNET_TRY(check_mask(kOp, p.mask_dtype, p.size, p.stride));
  SBNET_TRY(check_grid(kOp, p.grid));
  const int64_t per_image = int64_t{p.grid.count[0]} * p.grid.count[1];
  SBNET_CHECK(per_image == 0 || p.size[0] <= (INT32_MAX / 4) / per_image,
              "%s: grid: expected at most 2^29 blocks in all, got %lld images of %dx%d", kOp,
              static_cast<long long>(p.size[0]), p.grid.count[0], p.grid.count[1]);
  SBNET_CHECK(p.capacity >= 0 && p.capacity <= INT32_MAX / 4, "%s: capacity: expected 0 to 2^29, got %lld", kOp,
              static_cast<long long>(p.capacity));
  return ok_status();
}

int64_t reduce_mask_block_bytes(const ReduceMaskParams& p) {
  return (size_product({p.size[0], p.grid.count[0], p.grid.count[1]}) + 1023) / 1024 * 1024 + 16;
}

int64_t reduce_mask_slices(const ReduceMaskParams& p) {
  return p.grid.overlaps() ? std::clamp<int64_t>((1 << 20) / std::max<int64_t>(p.size[2], 1), 1, 16) : 0;
}

}  // namespace sbnet

int64_t sbnet_reduce_mask_workspace_bytes(const sbnet::ReduceMaskParams* p) {
  return sbnet::reduce_mask_block_bytes(*p) + sbnet::reduce_mask_slices(*p) * p->size[2] * 8;
}
