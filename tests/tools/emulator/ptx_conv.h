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
inline void read_tf32(float (&out)[8], const uint8_t* shared, uint64_t operand, int row) {
  const uint32_t first = static_cast<uint32_t>(operand & 0x3FFF) << 4;
  const uint32_t stride = static_cast<uint32_t>(operand >> 32 & 0x3FFF) << 4;
  for (int k = 0; k < 8; ++k) {
    const uint32_t at = emulator::swizzled(first + row / 8 * stride + row % 8 * 128 + k * 4);
    uint32_t bits = 0x7fffffff;  // NaN
    if (at + 4 <= emulator::kSharedBytes) std::memcpy(&bits, shared + at, 4);
    bits &= ~0x1fffu;
    std::memcpy(&out[k], &bits, 4);
  }
}
template <int N, int kSums>
void wgmma_tf32(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  static_assert((N == 32 || N == 128) && N / 2 <= kSums);
  const auto read = [shared = emulator::self->cta->shared](uint64_t operand, int row, float (&out)[8]) {
    read_tf32(out, shared, operand, row);
  };
  product<8, N>(
      d, accumulate, [=, row = own_row()](int h, float (&out)[8]) { read(a, row + h * 8, out); },
      [=](int n, float (&out)[8]) { read(b, n, out); });
}

}  // namespace sbnet::sm90
