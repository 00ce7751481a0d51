// Products whose reduction is up to four channels of a tap, padded with zeros: four taps are a step of mma.sync, and
// the four elements of a row that a lane holds in a step are the channels of one tap.
#pragma once
#include "cuda/common.cuh"

namespace sbnet::portable {

constexpr int kChannels = 4, kStepTaps = 4;

// The channels of a tap of x, or of a weight: one lane's part of an operand.
struct Quad {
  uint16_t v[kChannels];
  __device__ __forceinline__ uint32_t low() const { return v[0] | static_cast<uint32_t>(v[1]) << 16; }
  __device__ __forceinline__ uint32_t high() const { return v[2] | static_cast<uint32_t>(v[3]) << 16; }
};
template <int kMost>
__device__ __forceinline__ Quad read_quad(const uint16_t* from, int64_t apart, int channels, bool in) {
  Quad quad;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    quad.v[c] = 0;
    if (c < kMost && (in & (c < channels))) quad.v[c] = from[c * apart];
  }
  return quad;
}

}  // namespace sbnet::portable
