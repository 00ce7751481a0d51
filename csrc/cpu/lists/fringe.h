// Lists of pixels on the CPU: made by fringe and mask_pyramid, cleared by the layers.
#pragma once
#include "core/lists/fringe.h"

namespace sbnet {

// Sets the listed pixels of y, of any dtype of 1, 2 or 4 bytes, to zero.
void zero_fringe(const TensorView& y, const FringeView& fringe, const Parallel& parallel);

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
