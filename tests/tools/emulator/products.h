// Stands for csrc/cuda/products.cuh.
#pragma once
#include "cuda/mma.cuh"

namespace sbnet::portable {

inline void copy_16(uint32_t to, const void* from) { cp_async_16(to, from, true); }

inline void load_matrix_x4_transposed(uint32_t shared, uint32_t (&r)[4]) {
  if (shared % 16) emulator::fail("a row of a matrix that is not aligned");
  const emulator::Words rows = emulator::exchange(shared);
  const int lane = static_cast<int>(emulator::self->thread % 32);
  for (int m = 0; m < 4; ++m)
    for (int i = 0; i < 2; ++i)
      std::memcpy(reinterpret_cast<uint8_t*>(&r[m]) + i * 2,
                  emulator::shared_at(static_cast<uint32_t>(rows[m * 8 + lane % 4 * 2 + i][0])) + lane / 4 * 2, 2);
}

inline float exp2_approx(float v) { return std::exp2(v); }
inline float reciprocal_approx(float v) { return 1.f / v; }
inline void named_barrier(int id, int threads) {
  emulator::meet(emulator::self->cta->named[id], threads, "a named barrier");
}

template <class T>
struct Product {
  static void add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_16x8<T>(sum, a, b0, b1); }
  static void set(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    for (float& v : sum) v = 0;
    mma_16x8<T>(sum, a, b0, b1);
  }
};

}  // namespace sbnet::portable
