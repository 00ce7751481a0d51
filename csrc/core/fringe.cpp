#include "core/fringe.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const FringeParams& p) {
  constexpr const char* kOp = "fringe";
  SBNET_CHECK(p.batch >= 0 && p.height >= 1 && p.width >= 1 && p.height <= (1 << 29) && p.width <= (1 << 29),
              "%s: size: batch %lld, plane %lldx%lld; sides of 1 to 2^29 are wanted", kOp,
              static_cast<long long>(p.batch), static_cast<long long>(p.height), static_cast<long long>(p.width));
  SBNET_CHECK(p.height * p.width <= INT32_MAX && p.batch <= INT32_MAX / (p.height * p.width),
              "%s: size: %lld planes of %lldx%lld; less than 2^31 pixels are wanted", kOp,
              static_cast<long long>(p.batch), static_cast<long long>(p.height), static_cast<long long>(p.width));
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(p.kernel[d] >= 1 && p.stride[d] >= 1 && p.dilation[d] >= 1 && p.padding[d] >= 0,
                "%s: kernel_size, stride, dilation, padding: %d, %d, %d, %d; at least 1, 1, 1, 0 is wanted", kOp,
                p.kernel[d], p.stride[d], p.dilation[d], p.padding[d]);
    SBNET_CHECK(int64_t{p.kernel[d]} * p.dilation[d] <= (1 << 29) && p.padding[d] <= (1 << 29),
                "%s: kernel_size, dilation, padding: %d, %d, %d; a reach of at most 2^29 is wanted", kOp, p.kernel[d],
                p.dilation[d], p.padding[d]);
    const int64_t in = d == 0 ? p.height : p.width, out = d == 0 ? p.out_height : p.out_width;
    const int64_t reach = in + 2 * int64_t{p.padding[d]} - int64_t{p.dilation[d]} * (p.kernel[d] - 1) - 1;
    SBNET_CHECK(reach >= 0 && out == reach / p.stride[d] + 1,
                "%s: consumer: output side %lld does not follow from input side %lld, kernel_size %d, stride %d, "
                "padding %d, dilation %d",
                kOp, static_cast<long long>(out), static_cast<long long>(in), p.kernel[d], p.stride[d], p.padding[d],
                p.dilation[d]);
  }
  SBNET_TRY(check_active(kOp, p.producer));
  SBNET_TRY(check_active(kOp, p.consumer));
  SBNET_TRY(check_tiling(kOp, p.producer.grid, p.height, p.width));
  SBNET_TRY(check_tiling(kOp, p.consumer.grid, p.out_height, p.out_width));
  SBNET_CHECK(p.batch == 0 || (p.producer.block_map && p.consumer.block_map), "%s: active: block map missing", kOp);
  SBNET_CHECK(p.capacity >= 0 && p.capacity <= INT32_MAX, "%s: capacity: %lld; 0 to 2^31 - 1 is wanted", kOp,
              static_cast<long long>(p.capacity));
  return ok_status();
}

}  // namespace sbnet

// CPU: one byte a pixel. CUDA: one bit a pixel, then a count for each 2048 of them.
int64_t sbnet_fringe_workspace_bytes(const sbnet::FringeParams* p) {
  const int64_t chunks = (p->batch * p->height * p->width + 2047) / 2048;
  return chunks * 2048 + 16;
}
