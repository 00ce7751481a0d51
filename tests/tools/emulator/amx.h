// The macros of csrc/cpu/simd/tiles.h in plain C++, for processors without AMX: the library that
// tests/tools/emulate_amx.sh builds.
#pragma once

namespace sbnet {
namespace SBNET_ISA {

struct EmulatedTiles {
  TileShapes shapes;
  uint8_t data[8][kTileRows][kTileBytes];
};
static thread_local EmulatedTiles emulated_tiles;

SBNET_INLINE void check_tiles(bool right) {
  if (!right) __builtin_trap();  // the processor would fault
}

static void configure_tiles(const TileShapes& shapes) {
  for (int i = 0; i < 8; ++i)
    check_tiles(shapes.rows[i] > 0 && shapes.rows[i] <= kTileRows && shapes.row_bytes[i] > 0 &&
                shapes.row_bytes[i] <= kTileBytes && shapes.row_bytes[i] % 4 == 0);
  emulated_tiles = {};
  emulated_tiles.shapes = shapes;
}

static void release_tiles() { emulated_tiles.shapes.palette = 0; }

static void zero_tile(int reg) {
  check_tiles(emulated_tiles.shapes.palette == 1);
  __builtin_memset(emulated_tiles.data[reg], 0, sizeof(emulated_tiles.data[reg]));
}

static void load_tile(int reg, const void* at, int64_t bytes) {
  zero_tile(reg);
  for (int i = 0; i < emulated_tiles.shapes.rows[reg]; ++i)
    __builtin_memcpy(emulated_tiles.data[reg][i], static_cast<const char*>(at) + i * bytes,
                     emulated_tiles.shapes.row_bytes[reg]);
}

static void store_tile(int reg, void* at, int64_t bytes) {
  check_tiles(emulated_tiles.shapes.palette == 1);
  for (int i = 0; i < emulated_tiles.shapes.rows[reg]; ++i)
    __builtin_memcpy(static_cast<char*>(at) + i * bytes, emulated_tiles.data[reg][i],
                     emulated_tiles.shapes.row_bytes[reg]);
}

// What both kinds of sums of a word are: products of its elements.
template <class T>
SBNET_INLINE void add_word(float* sum, const uint8_t* a, const uint8_t* b) {
  T left[2], right[2];
  __builtin_memcpy(left, a, 4);
  __builtin_memcpy(right, b, 4);
  for (int i = 0; i < 2; ++i) *sum += widen(left[i]) * widen(right[i]);
}
template <class T>
SBNET_INLINE void add_word(int32_t* sum, const uint8_t* a, const uint8_t* b) {
  for (int i = 0; i < 4; ++i) *sum += static_cast<int8_t>(a[i]) * static_cast<int8_t>(b[i]);
}

template <class T, class Sum>
static void dot_tiles(int to, int left, int right) {
  EmulatedTiles& t = emulated_tiles;
  const TileShapes& s = t.shapes;
  check_tiles(s.palette == 1 && s.rows[to] == s.rows[left] && s.row_bytes[to] == s.row_bytes[right] &&
              s.row_bytes[left] == s.rows[right] * 4);
  for (int m = 0; m < s.rows[to]; ++m)
    for (int n = 0; n < s.row_bytes[to]; n += 4) {
      Sum sum;
      __builtin_memcpy(&sum, t.data[to][m] + n, 4);
      for (int k = 0; k < s.rows[right]; ++k) add_word<T>(&sum, t.data[left][m] + 4 * k, t.data[right][k] + n);
      __builtin_memcpy(t.data[to][m] + n, &sum, 4);
    }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#define SBNET_TILE_CONFIGURE(shapes) configure_tiles(shapes)
#define SBNET_TILE_RELEASE() release_tiles()
#define SBNET_TILE_ZERO(reg) zero_tile(reg)
#define SBNET_TILE_LOAD(reg, at, bytes) load_tile(reg, at, bytes)
#define SBNET_TILE_STORE(reg, at, bytes) store_tile(reg, at, bytes)
#define SBNET_TILE_DOT(T, sum, input, weight)         \
  do {                                                \
    if constexpr (kSame<T, int8_t>)                   \
      dot_tiles<int8_t, int32_t>(sum, input, weight); \
    else                                              \
      dot_tiles<T, float>(sum, input, weight);        \
  } while (0)
