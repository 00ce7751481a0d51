#include "core/window.h"

namespace sbnet {

Status read_window(const char* op, const int64_t (&numbers)[kWindowNumbers], Window* window) {
  for (const int64_t v : numbers)
    SBNET_CHECK(v >= INT32_MIN && v <= INT32_MAX, "%s: window: expected numbers of 32 bits, got %lld", op,
                static_cast<long long>(v));
  for (int d = 0; d < 2; ++d) {
    window->num[d] = static_cast<int32_t>(numbers[d]), window->den[d] = static_cast<int32_t>(numbers[2 + d]);
    window->lo[d] = static_cast<int32_t>(numbers[4 + d]), window->hi[d] = static_cast<int32_t>(numbers[6 + d]);
    window->step[d] = static_cast<int32_t>(numbers[8 + d]);
  }
  return ok_status();
}

Status check_window(const char* op, const Window& w, const int64_t in_size[2], const int64_t out_size[2]) {
  constexpr int64_t kMost = INT32_MAX - 64;
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(w.num[d] >= 1 && w.den[d] >= 1 && w.step[d] >= 1,
                "%s: window: num, den, step: expected at least 1, got %d, %d, %d", op, w.num[d], w.den[d], w.step[d]);
    SBNET_CHECK(w.lo[d] <= w.hi[d], "%s: window: expected lo of at most hi, got %d, %d", op, w.lo[d], w.hi[d]);
    SBNET_CHECK(w.den[d] == 1 || w.step[d] == 1, "%s: window: expected a step of 1 where den is not 1, got %d", op,
                w.step[d]);
    const int64_t reach = w.lo[d] < 0 ? -int64_t{w.lo[d]} : w.lo[d], other = w.hi[d] < 0 ? -int64_t{w.hi[d]} : w.hi[d];
    const int64_t most = reach > other ? reach : other;
    SBNET_CHECK(most <= (1 << 29), "%s: window: lo, hi: expected a reach of at most 2^29, got %d, %d", op, w.lo[d],
                w.hi[d]);
    SBNET_CHECK(out_size[d] <= (kMost - most) / w.num[d] && in_size[d] <= (kMost - most) / w.den[d] - 64,
                "%s: window: expected coordinates below 2^31, got sides %lld, %lld of num %d, den %d, lo %d, hi %d", op,
                static_cast<long long>(in_size[d]), static_cast<long long>(out_size[d]), w.num[d], w.den[d], w.lo[d],
                w.hi[d]);
  }
  return ok_status();
}

}  // namespace sbnet
