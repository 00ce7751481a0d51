// Stands for csrc/cuda/sm90/attention/ptx.cuh.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90::attention {

template <class R>
void pin_all(R&) {}

inline uint32_t bit_run(int from, int count) {
  uint32_t ones = 0;
  for (int bit = from; bit < 32 && bit - from < count; ++bit) ones |= 1u << bit;
  return ones;
}
inline float2 load_shared_pair(uint32_t from) { return load_shared_as<float2>(from); }

inline void tma_prefetch(const CUtensorMap*, int, int, int, int, int) {}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    emulator::fail("a bulk copy that is not aligned");
  uint8_t* data = emulator::shared_at(to);
  emulator::copy_later(emulator::cta_at(to), emulator::barrier_at(bar), bytes, [=] { std::memcpy(data, from, bytes); });
}
inline void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  if (from % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("a bulk sum that is not aligned");
  const uint8_t* data = emulator::shared_at(from);
  emulator::self->stores.push_back([=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) {
      float v;
      std::memcpy(&v, data + i * 4, 4);
      to[i] += v;
    }
  });
}
inline void add_global(float* to, float a, float b, float c, float d) {
  to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}
inline void tma_store_wait_all() { tma_store_wait_read(); }

inline uint64_t descriptor(uint32_t address_16, uint32_t next_64 = 0) {
  return static_cast<uint64_t>(1u << 30 | 64u) << 32 | (address_16 + (next_64 >> 4 << 16));
}
template <class T, int N>
void multiply_rows(float (&d)[N / 2], const uint32_t* a, uint64_t b) {
  wgmma_registers<T, N>(d, {a[0], a[1], a[2], a[3]}, b, 1, true);
}
template <class T>
void multiply_rows(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  wgmma<T, 64>(d, a, b, accumulate, false, true);
}

}  // namespace sbnet::sm90::attention
