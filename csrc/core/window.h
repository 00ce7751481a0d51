// Which coordinates of its input a layer reads, along one axis for output o: from floor((o*num + lo) / den) to
// floor((o*num + hi) / den), every step-th of them, as far as they lie in the plane. Convolutions and pools have den 1,
// upsampling and transposed convolutions a den of their scale. Fringes, the pyramid and the planner speak of nothing
// else.
#pragma once
#include "core/fastdiv.h"
#include "core/types.h"

namespace sbnet {

// Of both axes, the rows' first. den > 1 takes step 1.
struct Window {
  int32_t num[2], den[2], lo[2], hi[2], step[2];
};
constexpr int kWindowNumbers = 10;  // as bindings take it: num, den, lo, hi, step, two each

// Numbers as they came to a Window.
SBNET_EXPORT Status read_window(const char* op, const int64_t (&numbers)[kWindowNumbers], Window* window);
// May an out_size plane be made by reading an in_size plane through this window? What Reader's arithmetic relies on.
Status check_window(const char* op, const Window& w, const int64_t in_size[2], const int64_t out_size[2]);

SBNET_HOST_DEVICE inline int lesser(int a, int b) { return a < b ? a : b; }
SBNET_HOST_DEVICE inline int greater(int a, int b) { return a > b ? a : b; }

SBNET_HOST_DEVICE inline int floor_quotient(const FastDiv& d, int n) {
  return n >= 0 ? static_cast<int>(d.quotient(static_cast<uint32_t>(n)))
                : -1 - static_cast<int>(d.quotient(static_cast<uint32_t>(-1 - n)));
}

// A Window as kernels take it.
struct Reader {
  FastDiv num[2], den[2], step[2];
  int32_t lo[2], hi[2];
  Reader() = default;
  explicit Reader(const Window& w) {
    for (int d = 0; d < 2; ++d) {
      num[d] = FastDiv(w.num[d]), den[d] = FastDiv(w.den[d]), step[d] = FastDiv(w.step[d]);
      lo[d] = w.lo[d], hi[d] = w.hi[d];
    }
  }
  SBNET_HOST_DEVICE int scale(int d) const { return static_cast<int>(num[d].divisor); }
  SBNET_HOST_DEVICE int parts(int d) const { return static_cast<int>(den[d].divisor); }
  SBNET_HOST_DEVICE int stride(int d) const { return static_cast<int>(step[d].divisor); }
  // Does an output read every coordinate between its first and its last?
  SBNET_HOST_DEVICE bool dense(int d) const { return step[d].divisor == 1 || lo[d] == hi[d]; }
  // And do neighbouring outputs read neighbouring or common coordinates?
  SBNET_HOST_DEVICE bool without_gaps(int d) const { return dense(d) && scale(d) + lo[d] <= hi[d] + parts(d); }
  // The first and the last coordinate that output o reads.
  SBNET_HOST_DEVICE int first_read(int d, int o) const { return floor_quotient(den[d], o * scale(d) + lo[d]); }
  SBNET_HOST_DEVICE int last_read(int d, int o) const { return floor_quotient(den[d], o * scale(d) + hi[d]); }
  // The first and the last output whose coordinates, between its first and its last, reach `at`.
  SBNET_HOST_DEVICE int first_reader(int d, int at) const {
    return floor_quotient(num[d], at * parts(d) - hi[d] - 1) + 1;
  }
  SBNET_HOST_DEVICE int last_reader(int d, int at) const {
    return floor_quotient(num[d], (at + 1) * parts(d) - 1 - lo[d]);
  }
};

}  // namespace sbnet
