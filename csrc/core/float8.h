// float8_e4m3fn: four bits of exponent, three of mantissa, no infinities; 0x7f and 0xff are NaN, 448 is the largest.
#pragma once
#include <cstdint>
#include <cstring>

namespace sbnet {

constexpr float kLargestFloat8 = 448.0f;

inline float float8_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return __builtin_nanf("");
  const float magnitude =
      __builtin_ldexpf(static_cast<float>(exponent ? 8 + mantissa : mantissa), (exponent ? exponent : 1) - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

// The nearest one, halves to even; what is larger than 448 becomes 448, NaN stays.
inline uint8_t float8_bits(float value) {
  uint32_t bits, rounded;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint8_t>(sign | 0x7f);
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  if (magnitude > kLargestFloat8) return static_cast<uint8_t>(sign | 0x7e);
  if (magnitude < 0x1p-6f) {  // subnormal, a multiple of 2^-9: the sum's last bit
    magnitude += 0x1p14f;
    std::memcpy(&rounded, &magnitude, 4);
    rounded -= 0x46800000;
  } else {
    rounded = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  }
  return static_cast<uint8_t>(sign | rounded);
}

}  // namespace sbnet
