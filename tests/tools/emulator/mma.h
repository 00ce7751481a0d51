// Stands for csrc/cuda/mma.cuh: the same functions, for the machine in machine.h.
#pragma once
#include "cuda/tf32.cuh"
#include "machine.h"

namespace sbnet {

inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <int kBytes>
void copy_async(uint32_t shared, const void* global, bool in) {
  if (shared % kBytes || (in && reinterpret_cast<uintptr_t>(global) % kBytes))
    emulator::fail("a copy that is not aligned");
  uint8_t* to = emulator::shared_at(shared);
  emulator::self->products.push_back([=] {
    if (in)
      std::memcpy(to, global, kBytes);
    else
      std::memset(to, 0, kBytes);
  });
}
inline void cp_async_16(uint32_t shared, const void* global, bool in, bool issue = true) {
  if (issue) copy_async<16>(shared, global, in);
}
inline void cp_async_4(uint32_t shared, const void* global, bool in) { copy_async<4>(shared, global, in); }
inline void cp_async_16_whole(uint32_t shared, const void* global) { cp_async_16(shared, global, true); }
inline void cp_async_16_or_zeros(uint32_t shared, const void* global, bool in) {
  if (in) return cp_async_16_whole(shared, global);
  if (shared % 16) emulator::fail("a store that is not aligned");
  std::memset(emulator::shared_at(shared), 0, 16);
}
inline void cp_async_commit() {
  emulator::self->committed.push_back(std::exchange(emulator::self->products, {}));
  ++emulator::progress;
}
template <int kPending>
void cp_async_wait() {
  while (emulator::self->committed.size() > kPending) emulator::do_first(emulator::self->committed);
}

inline void load_matrix_x4(uint32_t shared, uint32_t (&r)[4]) {
  if (shared % 16) emulator::fail("a row of a matrix that is not aligned");
  const emulator::Words rows = emulator::exchange(shared);
  const int lane = static_cast<int>(emulator::self->thread % 32);
  for (int m = 0; m < 4; ++m)
    std::memcpy(&r[m], emulator::shared_at(static_cast<uint32_t>(rows[m * 8 + lane / 4][0])) + lane % 4 * 4, 4);
}

// The low half of `a` and b[0] hold bytes 0 to 15 of the reduction.
template <class T, class Sum>
void mma_16x8(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(sizeof(T) <= 4);
  const auto pair = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  emulator::Warp& warp = emulator::self->cta->warps[emulator::self->thread / 32];
  const unsigned generation = warp.meeting.generation, slot = generation & 1;
  const emulator::Words all = emulator::exchange(pair(a[0], a[2]), pair(a[1], a[3]), pair(b0, b1));
  constexpr int kSize = static_cast<int>(sizeof(T)), kSteps = 32 / kSize;
  Sum(*values)[32] = reinterpret_cast<Sum(*)[32]>(warp.operands[slot]);  // 16 rows, 8 columns
  if (warp.decoded[slot] != generation + 1) {                            // by the lane that comes first
    for (int row = 0; row < 24; ++row)
      for (int k = 0; k < kSteps; ++k) {  // lane 4 * row + j has bytes 4j and 16 + 4j
        const int byte = k * kSize;
        const uint64_t bits = all[row % 8 * 4 + byte % 16 / 4][row / 8] >> (byte / 16 * 32 + byte % 4 * 8);
        if constexpr (kSize == 2) {
          values[row][k] = emulator::value_of_half<T>(static_cast<uint16_t>(bits));
        } else {
          const uint32_t word = static_cast<uint32_t>(std::is_same_v<T, float> ? bits & ~uint64_t{0x1fff} : bits);
          T v;
          std::memcpy(&v, &word, sizeof(T));
          values[row][k] = static_cast<Sum>(v);
        }
      }
    warp.decoded[slot] = generation + 1;
  }
  const int lane = static_cast<int>(emulator::self->thread % 32);
  const Sum* rows[2] = {values[lane / 4], values[8 + lane / 4]};
  const Sum* columns[2] = {values[16 + lane % 4 * 2], values[17 + lane % 4 * 2]};
  for (int k = 0; k < kSteps; ++k)
    for (int e = 0; e < 4; ++e) d[e] += rows[e / 2][k] * columns[e % 2][k];
}

}  // namespace sbnet
