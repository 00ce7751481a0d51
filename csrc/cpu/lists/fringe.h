// Lists of pixels on the CPU: made by fringe and mask_pyramid, cleared by the layers.
#pragma once
#include "core/lists/fringe.h"

namespace sbnet {

// Sets the listed pixels of y, of any dtype of 1, 2 or 4 bytes, to zero.
void zero_fringe(const TensorView& y, const FringeView& fringe, const Parallel& parallel);

// Are row y's pixels of the fringe other columns than those of row y - 1? Not where both lie in one block row of their
// own plane, and outputs of the same block rows read them. `steps` leave rows out: nobody looks.
inline bool differs_from_row_above(const TiledPlane& mine, const TiledPlane& out, const Window& window, int y) {
  if (y % mine.side(0) == 0 || (window.step[0] > 1 && window.lo[0] != window.hi[0])) return true;
  const auto quotient = [](int a, int b) { return a >= 0 ? a / b : -1 - (-1 - a) / b; };  // rounded down
  const int num = window.num[0], den = window.den[0];
  int top[2], bottom[2];
  for (int k = 0; k < 2; ++k) {  // as Reader::first_reader and last_reader
    const int at = y - 1 + k;
    const int first = greater(quotient(at * den - window.hi[0] - 1, num) + 1, 0);
    const int last = lesser(quotient((at + 1) * den - 1 - window.lo[0], num), out.size[0] - 1);
    top[k] = first > last ? -1 : first / out.side(0), bottom[k] = first > last ? -1 : last / out.side(0);
  }
  return top[0] != top[1] || bottom[0] != bottom[1];
}

// The set bits of a plane's words, in order: linear pixel indices, then -1.
inline void list_pixels(const uint32_t* words, int64_t rows, int64_t width, int64_t capacity, int32_t* pixels,
                        int32_t* count) {
  const int64_t words_per_row = (width + 31) / 32;
  int64_t found = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t w = 0; w < words_per_row; ++w)
      for (uint32_t bits = words[r * words_per_row + w]; bits && found < capacity; bits &= bits - 1)
        pixels[found++] = static_cast<int32_t>(r * width + w * 32 + __builtin_ctz(bits));
  *count = static_cast<int32_t>(found);
  for (int64_t k = found; k < capacity; ++k) pixels[k] = -1;
}

}  // namespace sbnet
