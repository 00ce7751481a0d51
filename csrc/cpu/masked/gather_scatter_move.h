// sparse_gather, and sparse_scatter without add. Included once by each blocks_<isa>.cpp; see isa.h for why. T carries
// an element's size, not its type.
#pragma once
#include "cpu/masked/gather_scatter_kernels.h"
#include "cpu/masked/gather_scatter_walk.h"
#include "cpu/masked/transpose.h"

namespace sbnet {
namespace SBNET_ISA {

SBNET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
SBNET_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
SBNET_INLINE int64_t ratio_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Span {
  int64_t begin, end;
};
// Part `i` of `parts` of [0, n).
SBNET_INLINE Span share(int64_t n, int64_t i, int64_t parts) { return {n * i / parts, n * (i + 1) / parts}; }

template <class T>
SBNET_INLINE char* bytes_at(const TensorView& t, int64_t n, int64_t c, int64_t y, int64_t x) {
  return reinterpret_cast<char*>(element<T>(t, n, c, y, x));
}

// What the description of a copy says, in the terms of the walks below.
struct Walk {
  const BlockCopyParams& p;
  bool gather;
  int64_t height, width, channels;  // of a block
  int64_t count, slots;             // slots from count on are zeroed
};

// A gather's block where it does not lie on the plane: rows `rows`, channels `depth`.
template <class T>
static void zero_outside(const Walk& w, int64_t slot, const BlockPart& part, Span rows, Span depth) {
  const TensorView& t = w.p.blocks;
  const bool last = t.stride[1] == 1;
  const auto zero = [&](int64_t r, int64_t x0, int64_t x1) {
    const Span outer = last ? Span{x0, x1} : depth, inner = last ? depth : Span{x0, x1};
    for (int64_t o = outer.begin; o < outer.end; ++o)
      __builtin_memset(element<T>(t, slot, last ? inner.begin : o, r, last ? o : inner.begin), 0,
                       static_cast<size_t>(inner.end - inner.begin) * sizeof(T));
  };
  if (part.row1 - part.row0 == w.height && part.column1 - part.column0 == w.width) return;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const bool inside = r >= part.row0 && r < part.row1;
    const int64_t x0 = inside ? part.column0 : w.width, x1 = inside ? part.column1 : w.width;
    if (x0 > 0) zero(r, 0, x0);
    if (x1 < w.width) zero(r, x1, w.width);
  }
}

constexpr int64_t kTogether = 16;

// The unit of work of an NCHW map: some slots in a row, whose blocks are mostly neighbours and share its pages and
// lines.
struct Chunk {
  int64_t slot, size;
  BlockPart parts[kTogether];
};

SBNET_INLINE int64_t slots_together(const Walk& w) { return larger(1, smaller(kTogether, kPixels / w.width)); }

SBNET_INLINE Chunk chunk_at(const Walk& w, int64_t index) {
  Chunk chunk;
  chunk.slot = index * slots_together(w);
  chunk.size = smaller(slots_together(w), w.slots - chunk.slot);
  for (int64_t k = 0; k < chunk.size; ++k) chunk.parts[k] = block_part(w.p, chunk.slot + k, w.count);
  return chunk;
}

// How many of the chunk's blocks, from `first` on, lie side by side without gaps.
SBNET_INLINE int64_t side_by_side(const Walk& w, const Chunk& chunk, int64_t first) {
  const int64_t step = w.p.active.grid.stride[1];
  const BlockPart* part = chunk.parts + first;
  const BlockPart* end = chunk.parts + chunk.size;
  int64_t k = 1;
  if (step <= w.width && part->row1 > 0)
    for (; part + k < end && part[k].row1 > 0 && part[k].n == part->n && part[k].y == part->y; ++k)
      if (part[k].x != part[k - 1].x + step) break;
  return k;
}

// ---- Between NCHW sides: neighbours take turns at each channel. What is streamed is put together to whole rows first.

template <bool kStream, class T>
static void move_planes(const Walk& w, const Parallel& parallel) {
  constexpr int64_t kItem = sizeof(T), kRun = 16, kBuffer = 16384;
  const TensorView &plane = w.p.plane, &blocks = w.p.blocks;
  const int64_t runs = ratio_up(w.channels, kRun), chunks = ratio_up(w.slots, slots_together(w));
  const int64_t grain = 1 + 32768 / (slots_together(w) * kRun * w.height * w.width * kItem);
  parallel_for(parallel, chunks * runs, grain, [&](int64_t begin, int64_t end) {
    alignas(kLine) char rows[kBuffer];
    for (int64_t u = begin; u < end; ++u) {
      const Chunk chunk = chunk_at(w, u / runs);
      const int64_t c0 = u % runs * kRun, c1 = smaller(c0 + kRun, w.channels);
      for (int64_t k = 0; w.gather && k < chunk.size; ++k)
        zero_outside<T>(w, chunk.slot + k, chunk.parts[k], {0, w.height}, {c0, c1});
      for (int64_t s = 0, near; s < chunk.size; s += near) {
        near = side_by_side(w, chunk, s);
        const BlockPart *first = chunk.parts + s, *last = first + near - 1;
        const bool joined = kStream && near > 1;
        for (int64_t c = c0; c < c1; ++c) {
          if (joined) {
            char* out = bytes_at<T>(plane, first->n, c, first->y, first->x + first->column0);
            const int64_t bytes = (last->x + last->column1 - first->x - first->column0) * kItem;
            const int64_t step = larger(1, smaller(kBuffer / bytes, first->row1 - first->row0));
            for (int64_t r = first->row0, r1; r < first->row1; r = r1) {
              r1 = smaller(r + step, first->row1);
              int64_t left = 0;
              for (int64_t k = 0; k < near; ++k) {
                const int64_t piece = (first[k].column1 - first[k].column0) * kItem;
                const char* from = bytes_at<T>(blocks, chunk.slot + s + k, c, r, first[k].column0);
                for (int64_t y = r; y < r1; ++y, from += blocks.stride[2] * kItem) {
                  __builtin_prefetch(from + w.height * w.width * kItem, 0, 2);
                  copy_short(rows + (y - r) * bytes + left, from, piece);
                }
                left += piece;
              }
              for (int64_t y = r; y < r1; ++y)
                copy_run<true>(out + y * plane.stride[2] * kItem, rows + (y - r) * bytes, bytes);
            }
            continue;
          }
          for (const BlockPart* part = first; part <= last; ++part) {
            const int64_t bytes = (part->column1 - part->column0) * kItem;
            char* out = bytes_at<T>(plane, part->n, c, part->y + part->row0, part->x + part->column0);
            char* own = bytes_at<T>(blocks, chunk.slot + (part - chunk.parts), c, part->row0, part->column0);
            for (int64_t r = part->row0; r < part->row1; ++r) {
              w.gather ? copy_run<false>(own, out, bytes) : copy_run<kStream>(out, own, bytes);
              out += plane.stride[2] * kItem;
              own += blocks.stride[2] * kItem;
            }
          }
        }
      }
    }
    if (kStream) stream_fence();
  });
}

// ---- Between an NCHW map and channels_last blocks: rows of neighbours, all channels of each before the next row. So
// each page of either side is met once.

template <bool kStream, class T>
static void move_rows(const Walk& w, const Parallel& parallel) {
  constexpr int64_t kRun = 256;
  const TensorView &plane = w.p.plane, &blocks = w.p.blocks;
  const int64_t runs = ratio_up(w.channels, kRun), chunks = ratio_up(w.slots, slots_together(w));
  const int64_t bands = smaller(w.height, ratio_up(4 * parallel.threads, chunks * runs));
  parallel_for(parallel, chunks * runs * bands, 1, [&](int64_t begin, int64_t end) {
    Pixels<T> px;
    px.pitch = plane.stride[1];
    for (int64_t u = begin; u < end; ++u) {
      const Chunk chunk = chunk_at(w, u / bands / runs);
      const Span rows = share(w.height, u % bands, bands);
      const int64_t c0 = u / bands % runs * kRun, depth = smaller(kRun, w.channels - c0);
      for (int64_t k = 0; w.gather && k < chunk.size; ++k)
        zero_outside<T>(w, chunk.slot + k, chunk.parts[k], rows, {c0, c0 + depth});
      for (int64_t s = 0, near; s < chunk.size; s += near) {
        near = side_by_side(w, chunk, s);
        const BlockPart* part = chunk.parts + s;
        const Span inside = {larger(rows.begin, part->row0), smaller(rows.end, part->row1)};
        // Only a block that is alone is wider than the list.
        for (int64_t x0 = part->column0; x0 < part->column1; x0 += kPixels) {
          px.listed = 0;
          for (int64_t k = 0; k < near; ++k)
            for (int64_t x = k ? part[k].column0 : x0; x < part[k].column1 && px.listed < kPixels; ++x, ++px.listed) {
              px.pixel[px.listed] = static_cast<int32_t>(part[k].x + x - part->x - x0);
              px.at[px.listed] = k * blocks.stride[0] + x * blocks.stride[3];
            }
          px.pixels = px.pixel[px.listed - 1] + 1;
          for (int64_t r = inside.begin; r < inside.end; ++r) {
            px.first = element<T>(plane, part->n, c0, part->y + r, part->x + x0);
            px.last = element<T>(blocks, chunk.slot + s, c0, r, 0);
            const int64_t more = r + 1 < inside.end;
            if (w.gather)
              write_channels_last<kStream>(px, depth, px.first + more * plane.stride[2]);
            else
              write_channels_first<kStream>(px, depth, px.last + more * blocks.stride[2]);
          }
          if (near > 1) break;
        }
      }
    }
    if (kStream) stream_fence();
  });
}

// ---- Between a channels_last map and NCHW blocks: as many rows of a block as the list holds. Its pixels follow each
// other across rows: a width of 18 leaves no parts of vectors over.

template <bool kStream, class T>
static void move_blocks(const Walk& w, const Parallel& parallel) {
  constexpr int64_t kRun = 256;
  const TensorView &plane = w.p.plane, &blocks = w.p.blocks;
  const int64_t runs = ratio_up(w.channels, kRun), most_rows = larger(1, kPixels / w.width);
  const int64_t bands = ratio_up(w.height, most_rows);
  const int64_t grain = 1 + 32768 / (smaller(kRun, w.channels) * most_rows * w.width * int64_t{sizeof(T)});
  parallel_for(parallel, w.slots * runs * bands, grain, [&](int64_t begin, int64_t end) {
    Pixels<T> px;
    px.pitch = blocks.stride[1];
    const auto read_at = [&](int64_t u) {
      const int64_t slot = u / bands / runs, c0 = u / bands % runs * kRun,
                    row = share(w.height, u % bands, bands).begin;
      if (!w.gather) return element<T>(blocks, slot, c0, row, 0);
      const BlockPart part = block_part(w.p, slot, w.count);
      return element<T>(plane, part.n, c0, part.y + larger(row, part.row0), part.x + part.column0);
    };
    for (int64_t u = begin; u < end; ++u) {
      const T* next = read_at(u + 1 < end ? u + 1 : u);
      const int64_t slot = u / bands / runs, c0 = u / bands % runs * kRun, depth = smaller(kRun, w.channels - c0);
      const Span rows = share(w.height, u % bands, bands);
      const BlockPart part = block_part(w.p, slot, w.count);
      if (w.gather) zero_outside<T>(w, slot, part, rows, {c0, c0 + depth});
      const Span inside = {larger(rows.begin, part.row0), smaller(rows.end, part.row1)};
      const bool whole = part.column1 - part.column0 == w.width && w.width <= kPixels;
      const int64_t step = whole ? most_rows : 1;
      for (int64_t r = inside.begin; r < inside.end; r += step)
        for (int64_t x0 = part.column0; x0 < part.column1; x0 += kPixels) {
          const int64_t x1 = smaller(x0 + kPixels, part.column1);
          px.listed = 0;
          for (int64_t y = r; y < smaller(r + step, inside.end); ++y)
            for (int64_t x = x0; x < x1; ++x, ++px.listed) {
              px.pixel[px.listed] = static_cast<int32_t>(px.listed);
              px.at[px.listed] = (y - r) * plane.stride[2] + (x - x0) * plane.stride[3];
            }
          px.pixels = px.listed;
          px.first = element<T>(blocks, slot, c0, r, x0);
          px.last = element<T>(plane, part.n, c0, part.y + r, part.x + x0);
          const bool more = r + step < inside.end;
          if (w.gather)
            write_channels_first<kStream>(px, depth, more ? px.last + step * plane.stride[2] : next);
          else
            write_channels_last<kStream>(px, depth, more ? px.first + step * w.width : next);
        }
    }
    if (kStream) stream_fence();
  });
}

// ---- Between channels_last sides, a row of pixels at a time; and between sides of any other strides, one by one.

template <bool kStream, class T>
static void move_pixels(const Walk& w, const Parallel& parallel) {
  constexpr int64_t kItem = sizeof(T);
  const TensorView &plane = w.p.plane, &blocks = w.p.blocks;
  const bool packed = plane.stride[1] == 1 && blocks.stride[1] == 1;
  const bool joined = plane.stride[3] == w.channels && blocks.stride[3] == w.channels;
  const TensorView &from = w.gather ? plane : blocks, &to = w.gather ? blocks : plane;
  const int64_t grain = 1 + 32768 / (w.channels * w.width * kItem);
  parallel_for(parallel, w.slots * w.height, grain, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t slot = u / w.height, r = u % w.height;
      const BlockPart part = block_part(w.p, slot, w.count);
      if (w.gather) zero_outside<T>(w, slot, part, {r, r + 1}, {0, w.channels});
      const int64_t columns = part.column1 - part.column0;
      if (r < part.row0 || r >= part.row1) continue;
      T* map = element<T>(plane, part.n, 0, part.y + r, part.x + part.column0);
      T* own = element<T>(blocks, slot, 0, r, part.column0);
      T *in = w.gather ? map : own, *out = w.gather ? own : map;
      const int64_t pieces = packed && joined ? 1 : columns,
                    bytes = (packed && joined ? columns : 1) * w.channels * kItem;
      for (int64_t x = 0; x < pieces; ++x, in += from.stride[3], out += to.stride[3]) {
        if (packed)
          copy_run<kStream>(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(in), bytes);
        else
          for (int64_t c = 0; c < w.channels; ++c) out[c * to.stride[1]] = in[c * from.stride[1]];
      }
    }
    if (kStream) stream_fence();
  });
}

template <bool kStream, class T>
static void move(const Walk& w, const Parallel& parallel) {
  const TensorView &plane = w.p.plane, &blocks = w.p.blocks;
  const bool plane_last = plane.stride[1] == 1, blocks_last = blocks.stride[1] == 1;
  const bool plane_first = plane.stride[3] == 1, blocks_first = blocks.stride[3] == 1;
  if (plane_last && blocks_last) return move_pixels<kStream, T>(w, parallel);
  if (plane_first && blocks_first) return move_planes<kStream, T>(w, parallel);
  if (plane_first && blocks_last) return move_rows<kStream, T>(w, parallel);
  if (plane_last && blocks_first) return move_blocks<kStream, T>(w, parallel);
  move_pixels<kStream, T>(w, parallel);
}

// A gather's stack is usually fresh memory, whose pages the system has just cleared in the cache: streaming slows it.
template <class T>
static void move_items(const BlockCopyParams& p, const Parallel& parallel) {
  constexpr int64_t kStreamBytes = 32 << 20;  // written by one call
  const BlockGrid& g = p.active.grid;
  const bool gather = p.direction == CopyDirection::kGather;
  const int64_t count = clamped_count(p), channels = p.plane.size[1];
  const Walk w = {p, gather, g.size[0], g.size[1], channels, count, gather && p.zero_tail ? p.blocks.size[0] : count};
  if (w.slots == 0) return;
  if (!gather && count * channels * w.height * w.width * int64_t{sizeof(T)} >= kStreamBytes)
    move<true, T>(w, parallel);
  else
    move<false, T>(w, parallel);
}

static void move_blocks_of(const BlockCopyParams& p, const Parallel& parallel, int64_t item) {
  switch (item) {
    case 1:
      return move_items<uint8_t>(p, parallel);
    case 2:
      return move_items<uint16_t>(p, parallel);
    case 4:
      return move_items<uint32_t>(p, parallel);
    default:
      return move_items<uint64_t>(p, parallel);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
