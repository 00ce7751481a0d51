// Stands for csrc/cuda/sm90/conv/ptx.cuh.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90 {

template <int kBytes>
void cp_async(uint32_t to, const void* from, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if (to % kBytes || valid < 0 || valid > kBytes) emulator::fail("a copy that is not aligned or too long");
  if (valid && reinterpret_cast<uintptr_t>(from) % kBytes) emulator::fail("a copy from an address not aligned");
  uint8_t* data = emulator::shared_at(to);
  emulator::self->stores.push_back([=] {
    std::memset(data, 0, kBytes);
    std::memcpy(data, from, valid);
  });
}
inline void cp_async_arrive(uint32_t bar) {
  emulator::copy_later(emulator::cta_at(bar), emulator::barrier_at(bar), 0,
                       [bar, &barrier = emulator::barrier_at(bar), copies = std::exchange(emulator::self->stores, {})] {
                         for (const emulator::Action& copy : copies) copy();
                         --barrier.pending;
                       });
  ++emulator::progress;
}
inline uint32_t saturated_bytes(int low, int high) {
  const auto byte = [](int v) { return static_cast<uint32_t>(std::min(std::max(v, -128), 127) & 0xff); };
  return byte(low) | byte(high) << 8;
}
// Of float32, whose low 13 bits are not read.
inline float element_of_tf32(const uint8_t* shared, uint64_t operand, int row, int k) {
  const uint32_t first = static_cast<uint32_t>(operand & 0x3FFF) << 4;
  const uint32_t stride = static_cast<uint32_t>(operand >> 32 & 0x3FFF) << 4;
  const uint32_t at = emulator::swizzled(first + row / 8 * stride + row % 8 * 128 + k * 4);
  if (at + 4 > emulator::kSharedBytes) return std::nanf("");
  uint32_t bits;
  std::memcpy(&bits, shared + at, 4);
  bits &= ~0x1fffu;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
template <int N, int kSums>
void wgmma_tf32(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  static_assert((N == 32 || N == 128) && N / 2 <= kSums);
  const uint8_t* shared = emulator::self->cta->shared;
  const int lane = static_cast<int>(emulator::self->thread % 32);
  const int row = static_cast<int>(emulator::self->thread / 32 % 4 * 16 + lane / 4);
  emulator::self->products.push_back([=, &d] {
    for (int n = 0; n < N / 8; ++n)
      for (int e = 0; e < 4; ++e) {
        float& sum = d[n * 4 + e];
        if (!accumulate) sum = 0;
        for (int k = 0; k < 8; ++k)
          sum += element_of_tf32(shared, a, row + e / 2 * 8, k) *
                 element_of_tf32(shared, b, n * 8 + lane % 4 * 2 + e % 2, k);
      }
  });
}

}  // namespace sbnet::sm90
