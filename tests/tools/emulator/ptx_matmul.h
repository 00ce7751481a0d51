// Stands for csrc/cuda/sm90/matmul/ptx.cuh.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90::matmul {

inline void tma_store(const CUtensorMap* m, uint32_t from, int c, int row) { store_box(m, from, {c, row}); }
inline void multicast_pixels(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int x, int y, int n,
                             uint32_t ctas) {
  for (uint32_t rank = 0; ctas >> rank; ++rank)
    if (ctas >> rank & 1) emulator::load_box(map_to_rank(to, rank), m, map_to_rank(bar, rank), {c, x, y, n});
}
inline uint32_t operand(uint32_t address, uint32_t next_64 = 0) {
  return (address & 0x3FFFF) >> 4 | next_64 >> 4 << 16;
}
template <class T, int N, bool kATransposed, bool kBTransposed>
void multiply_add(float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma<T, N>(d, a, b, 1, kATransposed, kBTransposed);
}
template <class T, int N>
void multiply_add(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_registers<T, N>(d, a, b, 1);
}

}  // namespace sbnet::sm90::matmul
