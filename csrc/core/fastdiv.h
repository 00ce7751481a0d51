// Division by a number known on the host without the division sequence: exact for every n below 2^31.
#pragma once
#include "core/types.h"

namespace sbnet {

struct FastDiv {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  FastDiv() = default;
  explicit FastDiv(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    if (d <= 1) return;
    while ((1ull << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - divisor)) / divisor + 1);
  }
  SBNET_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    if (divisor == 1) return n;
    const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 32);
    return (high + n) >> shift;
  }
  SBNET_HOST_DEVICE void divmod(uint32_t n, uint32_t* q, uint32_t* r) const {
    *q = quotient(n);
    *r = n - *q * divisor;
  }
};

}  // namespace sbnet
