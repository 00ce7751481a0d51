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

}  // namespace sbnet::sm90
