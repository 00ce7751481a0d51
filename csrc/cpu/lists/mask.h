// When a pixel of a mask is set, and lists of the blocks that are active, on the CPU: shared by reduce_mask and
// mask_pyramid.
#pragma once
#include "core/by_dtype.h"
#include "cpu/simd/half.h"

namespace sbnet {

inline float as_float(uint8_t v) { return v; }
inline float as_float(float v) { return v; }
inline float as_float(Half v) { return to_float(v); }
inline float as_float(BFloat16 v) { return to_float(v); }

// Decided in float32, as torch compares: a float32 0.1 is not above tol = 0.1.
template <class T>
inline bool above(T v, double tol) {
  return as_float(v) > static_cast<float>(tol);
}
template <>
inline bool above<double>(double v, double tol) {
  return v > tol;
}

// Lists the active blocks of `images` maps of count[0] x count[1]: their slots, -1 for the others and those past the
// capacity, and (image, row, column) of each slot, -1 after the last. Returns how many are active, listed or not.
inline int32_t list_blocks(const uint8_t* active, int64_t images, const int32_t (&count)[2], int64_t capacity,
                           int32_t* block_map, int32_t* indices) {
  int32_t total = 0;
  for (int32_t n = 0; n < images; ++n)
    for (int32_t i = 0; i < count[0]; ++i)
      for (int32_t j = 0; j < count[1]; ++j, ++active, ++block_map) {
        const bool listed = *active && total < capacity;
        *block_map = listed ? total : -1;
        total += *active;
        if (!listed) continue;
        *indices++ = n, *indices++ = i, *indices++ = j;
      }
  for (int64_t slot = total; slot < capacity; ++slot)
    for (int d = 0; d < 3; ++d) *indices++ = -1;
  return total;
}

}  // namespace sbnet
