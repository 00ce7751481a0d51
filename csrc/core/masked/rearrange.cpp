#include "core/masked/rearrange.h"

namespace sbnet {

constexpr const char* kOp = RearrangeLayer::kName;

Status RearrangeLayer::check(const RearrangeParams& p) {
  constexpr int32_t kMostFactor = 1 << 10, kMost = 1 << 24;
  SBNET_CHECK(p.up >= 1 && p.up <= kMostFactor && p.down >= 1 && p.down <= kMostFactor && p.groups >= 1,
              "%s: up, down, groups: expected at least 1, up and down at most %d, got %d, %d, %d", kOp, kMostFactor,
              p.up, p.down, p.groups);
  for (const int32_t pad : p.pad)
    SBNET_CHECK(pad > -kMost && pad < kMost, "%s: pad: expected numbers below 2^24, got %d", kOp, pad);
  return ok_status();
}

namespace {

Status channels_of(const RearrangeParams& p, int64_t x, int64_t* y) {
  SBNET_CHECK(x >= 1 && x <= INT32_MAX, "%s: x: expected 1 to 2^31 - 1 channels, got %lld", kOp,
              static_cast<long long>(x));
  SBNET_CHECK(x % (p.up * p.up) == 0, "%s: up: expected channels that %d x %d divides, got %lld", kOp, p.up, p.up,
              static_cast<long long>(x));
  *y = x / (p.up * p.up) * (p.down * p.down);
  SBNET_CHECK(*y <= INT32_MAX, "%s: down: expected less than 2^31 channels of the output, got %lld", kOp,
              static_cast<long long>(*y));
  SBNET_CHECK(*y % p.groups == 0, "%s: groups: expected a divisor of %lld channels, got %d", kOp,
              static_cast<long long>(*y), p.groups);
  return ok_status();
}

}  // namespace

Status RearrangeLayer::size(const RearrangeParams& p, int d, int64_t x, int64_t* y) {
  if (d == 1) return channels_of(p, x, y);
  constexpr int32_t kMost = 1 << 24;
  const int32_t front = p.pad[d == 2 ? 2 : 0], back = p.pad[d == 2 ? 3 : 1];
  SBNET_CHECK(x >= 1 && x < kMost, "%s: x: expected sides below 2^24, got %lld", kOp, static_cast<long long>(x));
  const int64_t wide = x * p.up;
  SBNET_CHECK(wide % p.down == 0 && wide < kMost,
              "%s: down: expected a plane below 2^24 whose sides %d divides, got %lld", kOp, p.down,
              static_cast<long long>(wide));
  const int64_t cropped = (front < 0 ? -int64_t{front} : 0) + (back < 0 ? -int64_t{back} : 0);
  SBNET_CHECK(cropped <= wide / p.down, "%s: pad: expected to crop at most %lld pixels, got %lld", kOp,
              static_cast<long long>(wide / p.down), static_cast<long long>(cropped));
  *y = wide / p.down + front + back;
  SBNET_CHECK(*y >= 1 && *y < kMost, "%s: pad: expected an output plane of 1 to 2^24 - 1, got %lld", kOp,
              static_cast<long long>(*y));
  return ok_status();
}

Status validate(const RearrangeParams& p) { return check_plain<RearrangeLayer>(p); }

}  // namespace sbnet
