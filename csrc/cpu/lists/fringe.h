// Lists of pixels on the CPU: made by fringe and mask_pyramid, cleared by the layers.
#pragma once
#include "core/lists/fringe.h"

namespace sbnet {

constexpr int64_t kFringePixels = 1 << 16;  // of whose rows a thread takes at least as many

// Sets the listed pixels of y, of any dtype of 1, 2 or 4 bytes, to zero.
void zero_fringe(const TensorView& y, const FringeView& fringe, const Parallel& parallel);

// Are row y's pixels of the fringe other columns than those of row y - 1? Not where both lie in one block row of their
// own plane, and outputs of the same block rows read them. Readers with
// `steps` leave rows out and always count as different.
inline bool differs_from_row_above(const TiledPlane& mine, const TiledPlane& out, const Reader& reader, int y) {
  uint32_t block, row;
  mine.block[0].divmod(static_cast<uint32_t>(y), &block, &row);
  if (row == 0 || !reader.dense(0)) return true;
  int top[2], bottom[2];
  for (int k = 0; k < 2; ++k) {
    const int first = greater(reader.first_reader(0, y - 1 + k), 0);
    const int last = lesser(reader.last_reader(0, y - 1 + k), out.size[0] - 1);
    const auto block_of = [&](int at) { return static_cast<int>(out.block[0].quotient(static_cast<uint32_t>(at))); };
    top[k] = first > last ? -1 : block_of(first), bottom[k] = first > last ? -1 : block_of(last);
  }
  return top[0] != top[1] || bottom[0] != bottom[1];
}

// The set bits of a plane's words, in order: linear pixel indices, then -1. kept: so many were listed there before, and
// -1 stands after them: a frame's few pixels need not write a list as long as the plane.
inline void list_pixels(const uint32_t* words, int64_t rows, int64_t width, int64_t capacity, bool kept,
                        int32_t* pixels, int32_t* count) {
  const int64_t words_per_row = (width + 31) / 32;
  int64_t found = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t w = 0; w < words_per_row; ++w)
      for (uint32_t bits = words[r * words_per_row + w]; bits && found < capacity; bits &= bits - 1)
        pixels[found++] = static_cast<int32_t>(r * width + w * 32 + __builtin_ctz(bits));
  const int64_t end = kept ? lesser(*count, static_cast<int>(capacity)) : capacity;
  *count = static_cast<int32_t>(found);
  for (int64_t k = found; k < end; ++k) pixels[k] = -1;
}

}  // namespace sbnet
