// The matrix registers of AMX: eight tiles of up to 16 rows of 64 bytes, by inline assembly, so that any compiler will
// do whose assembler knows them. SBNET_EMULATE_AMX names a header that says the same in plain C++
// (tests/tools/emulate_amx.sh).
#pragma once
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

// Memory of ldtilecfg.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0..3: sums, of `rows` rows; 4, 5: inputs, of `rows` rows too; 6, 7: weights. A product sums `bytes` of a
// row of inputs, with as many rows of weights as it has words of 4.
SBNET_INLINE TileShapes tile_shapes(int64_t rows, int64_t bytes) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? bytes : kTileBytes);
    shapes.rows[i] = static_cast<uint8_t>(i < 6 ? rows : bytes / 4);
  }
  return shapes;
}

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

}  // namespace SBNET_ISA
}  // namespace sbnet

#if defined(SBNET_EMULATE_AMX)
#include SBNET_EMULATE_AMX
#else
#define SBNET_TILE_CONFIGURE(shapes) asm volatile("ldtilecfg %0" : : "m"(shapes))
#define SBNET_TILE_RELEASE() asm volatile("tilerelease")
#define SBNET_TILE_ZERO(reg) asm volatile("tilezero %%tmm" #reg : : :)
#define SBNET_TILE_LOAD(reg, at, bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #reg : : "r"(at), "r"(static_cast<int64_t>(bytes)) : "memory")
#define SBNET_TILE_STORE(reg, at, bytes) \
  asm volatile("tilestored %%tmm" #reg ", (%0,%1,1)" : : "r"(at), "r"(static_cast<int64_t>(bytes)) : "memory")
// sum += inputs x weights of elements T: pairs of Half or BFloat, summed in float32, or fours of int8_t, in int32.
#define SBNET_TILE_DOT(T, sum, input, weight)                                        \
  do {                                                                               \
    if constexpr (kSame<T, int8_t>)                                                  \
      asm volatile("tdpbssd %%tmm" #weight ", %%tmm" #input ", %%tmm" #sum : : :);   \
    else if constexpr (kSame<T, Half>)                                               \
      asm volatile("tdpfp16ps %%tmm" #weight ", %%tmm" #input ", %%tmm" #sum : : :); \
    else                                                                             \
      asm volatile("tdpbf16ps %%tmm" #weight ", %%tmm" #input ", %%tmm" #sum : : :); \
  } while (0)
#endif

namespace sbnet {
namespace SBNET_ISA {

// Registers 0 ... count - 1, sums `bytes` a row, from zeros or from at(0) ... at(count - 1); and back.
template <int count, class At>
SBNET_INLINE void begin_sums(const At& at, int64_t bytes, bool zeros) {
  static_assert(count == 1 || count == 2 || count == 4, "registers of sums");
  if (zeros) {
    SBNET_TILE_ZERO(0);
    SBNET_TILE_ZERO(1);
    SBNET_TILE_ZERO(2);
    SBNET_TILE_ZERO(3);
    return;
  }
  SBNET_TILE_LOAD(0, at(0), bytes);
  if constexpr (count > 1) SBNET_TILE_LOAD(1, at(1), bytes);
  if constexpr (count > 2) {
    SBNET_TILE_LOAD(2, at(2), bytes);
    SBNET_TILE_LOAD(3, at(3), bytes);
  }
}

template <int count, class At>
SBNET_INLINE void store_sums(const At& at, int64_t bytes) {
  SBNET_TILE_STORE(0, at(0), bytes);
  if constexpr (count > 1) SBNET_TILE_STORE(1, at(1), bytes);
  if constexpr (count > 2) {
    SBNET_TILE_STORE(2, at(2), bytes);
    SBNET_TILE_STORE(3, at(3), bytes);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
