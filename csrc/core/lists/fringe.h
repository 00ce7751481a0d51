// The fringe of a tensor: the pixels that a consumer's active blocks read and no active block of the producer writes.
// They must read as zero; a producing layer zeroes them while it writes its blocks (FringeView in core/types.h).
//
// All devices work on words of 32 pixels of a row, bit k for pixel x0 + k: a block settles up to 32 pixels at once.
#pragma once
#include "core/kernels.h"
#include "core/window.h"

namespace sbnet {

struct FringeParams {
  ActiveView producer;            // tiling grid of the tensor's own plane; needs block_map
  ActiveView consumer;            // tiling grid of the consumer's output plane; needs block_map
  int64_t batch, height, width;   // of the tensor
  int64_t out_height, out_width;  // of the consumer's output
  Window window;                  // of the consumer
  int64_t capacity;
  int32_t* pixels;  // [capacity] out: linear indices (n*height + y)*width + x, ascending, then -1
  int32_t* count;   // [1] out: min(fringe pixels, capacity)
  bool kept;        // CPU: both are as a call of these params left them
};

SBNET_EXPORT Status validate(const FringeParams& p);

// Can a plane of `batch` images be listed by pixel?
Status check_listable(const char* op, int64_t batch, int64_t height, int64_t width);

// A plane and its tiling grid.
struct TiledPlane {
  int32_t size[2], count[2];
  FastDiv block[2];
  TiledPlane() = default;
  TiledPlane(int64_t height, int64_t width, const int32_t block_size[2])
      : size{static_cast<int32_t>(height), static_cast<int32_t>(width)} {
    for (int d = 0; d < 2; ++d) {
      block[d] = FastDiv(block_size[d]);
      count[d] = static_cast<int32_t>((int64_t{size[d]} + block_size[d] - 1) / block_size[d]);
    }
  }
  SBNET_HOST_DEVICE int side(int d) const { return static_cast<int>(block[d].divisor); }
  SBNET_HOST_DEVICE int words() const { return (size[1] + 31) / 32; }  // of a row of pixels
};

// The active blocks of one image: bit k of (i, j, n) is block (i, j + k), k < n <= 32.
struct MapLookup {
  const int32_t* map;  // [rows, columns] slot or -1
  int columns;
  SBNET_HOST_DEVICE uint32_t operator()(int i, int j, int n) const {
    const int32_t* at = map + static_cast<int64_t>(i) * columns + j;
    uint32_t bits = 0;
    for (int k = 0; k < n; ++k) bits |= static_cast<uint32_t>(at[k] >= 0) << k;
    return bits;
  }
};

SBNET_HOST_DEVICE inline int lowest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

// Bits [first, last) of a word; both ends may lie outside.
SBNET_HOST_DEVICE inline uint32_t bit_range(int first, int last) {
  if (first < 0) first = 0;
  if (last > 32) last = 32;
  return first < last ? ~0u >> (32 - (last - first)) << first : 0;
}

// The pixels of a word that lie inside the plane and in none of its active blocks.
template <class Active>
SBNET_HOST_DEVICE uint32_t unwritten(const TiledPlane& plane, const Active& active, int y, int x0) {
  const int first = static_cast<int>(plane.block[1].quotient(x0)), block = plane.side(1);
  const int last = lesser(static_cast<int>(plane.block[1].quotient(x0 + 31)), plane.count[1] - 1);
  uint32_t bits = bit_range(0, plane.size[1] - x0);
  uint32_t written = active(static_cast<int>(plane.block[0].quotient(y)), first, last - first + 1);
  for (; written; written &= written - 1) {
    const int start = (first + lowest_bit(written)) * block - x0;
    bits &= ~bit_range(start, start + block);
  }
  return bits;
}

// The columns of a word that block column j of the consumer's plane reads.
SBNET_HOST_DEVICE inline uint32_t columns_read(const TiledPlane& out, const Reader& r, int j, int x0) {
  const int first = j * out.side(1), last = lesser(first + out.side(1), out.size[1]) - 1;
  if (r.without_gaps(1)) return bit_range(r.first_read(1, first) - x0, r.last_read(1, last) + 1 - x0);
  uint32_t bits = 0;
  if (r.dense(1)) {
    const int end = lesser(last, r.last_reader(1, x0 + 31));
    for (int o = greater(first, r.first_reader(1, x0)); o <= end; ++o)
      bits |= bit_range(r.first_read(1, o) - x0, r.last_read(1, o) + 1 - x0);
    return bits;
  }
  // Steps, of which den is 1: tap after tap, those that reach the word.
  const int begin = r.first_read(1, first) - x0, end = r.first_read(1, last) - x0, scale = r.scale(1);
  const int taps = static_cast<int>(r.step[1].quotient(static_cast<uint32_t>(r.hi[1] - r.lo[1])));
  for (int tap = end >= 0 ? 0 : floor_quotient(r.step[1], -end - 1) + 1; tap <= taps; ++tap) {
    int at = begin + tap * r.stride(1);
    if (at >= 32) break;
    if (at < 0) at += (floor_quotient(r.num[1], -at - 1) + 1) * scale;
    for (; at < 32 && at <= end + tap * r.stride(1); at += scale) bits |= 1u << at;
  }
  return bits;
}

// Blocks (i, j0 ... j0 + n) of the consumer's plane, united over all i whose outputs read row y.
template <class Active>
SBNET_HOST_DEVICE uint32_t blocks_reading_row(const TiledPlane& out, const Reader& r, const Active& active, int y,
                                              int j0, int n) {
  const int first = greater(r.first_reader(0, y), 0), last = lesser(r.last_reader(0, y), out.size[0] - 1);
  if (first > last) return 0;
  if (r.dense(0)) {
    const int top = static_cast<int>(out.block[0].quotient(first));
    const int bottom = static_cast<int>(out.block[0].quotient(last));
    uint32_t found = active(top, j0, n) | active(bottom, j0, n);
    for (int i = top + 1; i < bottom; ++i) found |= active(i, j0, n);
    return found;
  }
  // Steps, of which den is 1: the taps whose output lies in the plane.
  uint32_t found = 0;
  int previous = -1;
  const int taps = static_cast<int>(r.step[0].quotient(static_cast<uint32_t>(r.hi[0] - r.lo[0])));
  const int reach = y - r.lo[0], beyond = reach - (out.size[0] - 1) * r.scale(0);
  for (int tap = beyond <= 0 ? 0 : floor_quotient(r.step[0], beyond - 1) + 1; tap <= taps; ++tap) {
    const int t = reach - tap * r.stride(0);
    if (t < 0) break;
    uint32_t o, rest;
    r.num[0].divmod(static_cast<uint32_t>(t), &o, &rest);
    if (rest) continue;
    const int i = static_cast<int>(out.block[0].quotient(o));
    if (i != previous) found |= active(i, j0, n);
    previous = i;
  }
  return found;
}

// Those of the `wanted` pixels of a word that active blocks of the consumer's plane read.
template <class Active>
SBNET_HOST_DEVICE uint32_t read_by(const TiledPlane& out, const Reader& r, const Active& active, int y, int x0,
                                   uint32_t wanted) {
  if (!wanted) return 0;
  const int high = lesser(r.last_reader(1, x0 + 31), out.size[1] - 1), low = greater(r.first_reader(1, x0), 0);
  if (low > high) return 0;
  const int first = static_cast<int>(out.block[1].quotient(low)), last = static_cast<int>(out.block[1].quotient(high));
  uint32_t found = 0;
  for (int j0 = first; j0 <= last; j0 += 32) {
    uint32_t readers = blocks_reading_row(out, r, active, y, j0, lesser(last - j0 + 1, 32));
    for (; readers; readers &= readers - 1) found |= columns_read(out, r, j0 + lowest_bit(readers), x0);
  }
  return found & wanted;
}

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(fringe, FringeParams)
