// What patches of int8 convolutions hold. SBNET_VNNI: bytes of an offset of 128, which unsigned-by-signed dot products
// want; the weights' sums take the offset back. SBNET_TILES: bytes, which AMX multiplies signed. Else both are widened
// to 16 bits, of whose pairs the sums are exact too.
#pragma once
#include "cpu/masked/conv_int8_finish.h"

namespace sbnet {
namespace SBNET_ISA {

#if defined(SBNET_VNNI)
using Element = uint8_t;
constexpr int64_t kDepth = 4;
constexpr int kZeroByte = 0x80;
#elif defined(SBNET_TILES)
using Element = int8_t;
constexpr int64_t kDepth = 64;
constexpr int kZeroByte = 0;
#else
using Element = int16_t;
constexpr int64_t kDepth = 2;
constexpr int kZeroByte = 0;
#endif
constexpr int32_t kOffset = kZeroByte;  // what patches hold of a zero

template <class T>
using Stored = Element;

SBNET_INLINE void put(Element* to, int8_t from, float) { *to = static_cast<Element>(from + kOffset); }
SBNET_INLINE void put_row(Element* to, const int8_t* from, int64_t count, float) {
#if defined(SBNET_VNNI)
  const __m512i offset = _mm512_set1_epi8(static_cast<int8_t>(kOffset));  // adding it is xor, as it is the highest bit
  for (; count >= 64; count -= 64, from += 64, to += 64)
    _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_loadu_si512(from), offset));
  if (!count) return;
  const __mmask64 rest = (uint64_t{1} << count) - 1;
  _mm512_mask_storeu_epi8(to, rest, _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, from), offset));
#elif defined(SBNET_TILES)
  __builtin_memcpy(to, from, count);
#else
  for (int64_t i = 0; i < count; ++i) put(to + i, from[i], 1);
#endif
}

typedef Element Elements __attribute__((vector_size(kLanes * sizeof(Element))));

SBNET_INLINE void put(Element* to, float from, float per_unit) {
  *to = static_cast<Element>(saturated(splat(from * per_unit))[0] + kOffset);
}
SBNET_INLINE void put_row(Element* to, const float* from, int64_t count, float per_unit) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Elements rounded =
        __builtin_convertvector(saturated(load(from + i) * per_unit), Elements) + static_cast<Element>(kOffset);
    __builtin_memcpy(to + i, &rounded, sizeof(rounded));
  }
  for (; i < count; ++i) put(to + i, from[i], per_unit);
}

}  // namespace SBNET_ISA
}  // namespace sbnet
