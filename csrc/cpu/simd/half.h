// float16 and bfloat16 in plain integer arithmetic, for CPU kernels that must not assume an instruction set.
#pragma once
#include <cstdint>
#include <cstring>

namespace sbnet {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float to_float(float v) { return v; }
inline float to_float(BFloat16 v) { return bits_to_float(static_cast<uint32_t>(v.bits) << 16); }
// Multiplying by 2^112 re-biases the exponent and normalises subnormals in one step; inf and nan are patched.
inline float to_float(Half v) {
  const uint32_t magnitude = (v.bits & 0x7fffu) << 13;
  uint32_t bits = float_to_bits(bits_to_float(magnitude) * bits_to_float(0x77800000u));
  if (magnitude >= 0x0f800000u) bits = magnitude | 0x7f800000u;
  return bits_to_float(bits | (v.bits & 0x8000u) << 16);
}

template <class T>
inline T from_float(float v);
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline BFloat16 from_float<BFloat16>(float v) {
  const uint32_t bits = float_to_bits(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};  // to nearest, ties to even
}
template <>
inline Half from_float<Half>(float v) {
  const uint32_t bits = float_to_bits(v), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t out;
  if (magnitude > 0x7f800000u) {
    out = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65520 or more
    out = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the result's last bit with the float's
    out = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    out = (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
  }
  return {static_cast<uint16_t>(sign | out)};
}

}  // namespace sbnet
