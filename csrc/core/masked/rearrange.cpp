#include "core/masked/rearrange.h"

#include "core/layer.h"

namespace sbnet {

constexpr const char* kOp = "sparse_rearrange";

Status rearrange_channels(const char* op, const RearrangeParams& p, int64_t channels, int64_t* out) {
  constexpr int32_t kMostFactor = 1 << 10;
  SBNET_CHECK(p.up >= 1 && p.up <= kMostFactor && p.down >= 1 && p.down <= kMostFactor,
              "%s: up, down: expected 1 to %d, got %d, %d", op, kMostFactor, p.up, p.down);
  SBNET_CHECK(channels >= 1 && channels <= INT32_MAX, "%s: x: expected 1 to 2^31 - 1 channels, got %lld", op,
              static_cast<long long>(channels));
  SBNET_CHECK(channels % (p.up * p.up) == 0, "%s: up: expected channels that %d x %d divides, got %lld", op, p.up, p.up,
              static_cast<long long>(channels));
  *out = channels / (p.up * p.up) * (p.down * p.down);
  SBNET_CHECK(*out <= INT32_MAX, "%s: down: expected less than 2^31 channels of the output, got %lld", op,
              static_cast<long long>(*out));
  SBNET_CHECK(p.groups >= 1 && *out % p.groups == 0, "%s: groups: expected a divisor of %lld channels, got %d", op,
              static_cast<long long>(*out), p.groups);
  return ok_status();
}

Status rearrange_side(const char* op, const RearrangeParams& p, int d, int64_t side, int64_t* out) {
  constexpr int32_t kMost = 1 << 24;
  const int32_t front = p.pad[2 - 2 * d], back = p.pad[3 - 2 * d];
  SBNET_CHECK(side >= 1 && side < kMost && front > -kMost && front < kMost && back > -kMost && back < kMost,
              "%s: x, pad: expected sides and padding below 2^24, got %lld, %d, %d", op, static_cast<long long>(side),
              front, back);
  const int64_t wide = side * p.up;
  SBNET_CHECK(p.down >= 1 && wide % p.down == 0 && wide < kMost,
              "%s: down: expected a plane below 2^24 whose sides %d divides, got %lld", op, p.down,
              static_cast<long long>(wide));
  const int64_t cropped = (front < 0 ? -int64_t{front} : 0) + (back < 0 ? -int64_t{back} : 0);
  SBNET_CHECK(cropped <= wide / p.down, "%s: pad: expected to crop at most %lld pixels, got %lld", op,
              static_cast<long long>(wide / p.down), static_cast<long long>(cropped));
  *out = wide / p.down + front + back;
  SBNET_CHECK(*out >= 1 && *out < kMost, "%s: pad: expected an output plane of 1 to 2^24 - 1, got %lld", op,
              static_cast<long long>(*out));
  return ok_status();
}

Status validate(const RearrangeParams& p) {
  SBNET_TRY(check_input(kOp, p.x));
  LayerShape out = {{p.x.size[0], 0, 0, 0}, "N, C_out, H_out, W_out"};
  SBNET_TRY(rearrange_channels(kOp, p, p.x.size[1], &out.size[1]));
  for (int d = 0; d < 2; ++d) SBNET_TRY(rearrange_side(kOp, p, d, p.x.size[2 + d], &out.size[2 + d]));
  return check_layer(kOp, p.x, p.y, out, p.active, p.fringe);
}

}  // namespace sbnet
