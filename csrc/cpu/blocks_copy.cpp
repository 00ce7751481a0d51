// sparse_gather and sparse_scatter on the CPU. Both directions walk block rows: (slot, row of the block).
#include <cstring>

#include "core/blocks.h"
#include "cpu/half.h"
#include "cpu/stream.h"
#include "cpu/transpose.h"

namespace sbnet {
namespace {

int64_t clamped_count(const BlockCopyParams& p) {
  const int64_t most = p.active.capacity < p.blocks.size[0] ? p.active.capacity : p.blocks.size[0];
  const int64_t count = *p.active.count;
  return count < 0 ? 0 : count < most ? count : most;
}

// One row of a block on the plane: row `y` of image n, columns [x, x + width of the block), of which [inside0, inside1)
// (counted from x) lie on the plane. A slot that names no block, or a row off the plane, has none.
struct BlockRow {
  int64_t n, y, x, inside0, inside1;
};

BlockRow block_row(const BlockCopyParams& p, int64_t slot, int64_t row, int64_t count) {
  const BlockGrid& g = p.active.grid;
  BlockRow r = {0, 0, 0, 0, 0};
  if (slot >= count) return r;
  const int32_t* at = p.active.indices + slot * 3;
  if (at[0] < 0 || at[0] >= p.plane.size[0] || at[1] < 0 || at[1] >= g.count[0] || at[2] < 0 || at[2] >= g.count[1])
    return r;
  r.n = at[0];
  r.y = g.offset[0] + int64_t{at[1]} * g.stride[0] + row;
  r.x = g.offset[1] + int64_t{at[2]} * g.stride[1];
  if (r.y < 0 || r.y >= p.plane.size[2]) return r;
  const int64_t first = r.x < 0 ? -r.x : 0, room = p.plane.size[3] - r.x;
  const int64_t last = room < g.size[1] ? room : g.size[1];
  if (first < last) r.inside0 = first, r.inside1 = last;
  return r;
}

// A row of a block as seen from one side: element (c, x) is data[c * stride_c + x * stride_x].
struct RowView {
  char* data;
  int64_t stride_c, stride_x;  // elements
};

// A block's rows are short: a call of memcpy for each would take longer than the copy.
inline void copy_short(char* out, const char* in, int64_t bytes) {
  if (bytes < 16 || bytes > 512) {
    std::memcpy(out, in, static_cast<size_t>(bytes));
    return;
  }
  int64_t at = 0;
  for (; at + 16 <= bytes; at += 16) std::memcpy(out + at, in + at, 16);
  std::memcpy(out + bytes - 16, in + bytes - 16, 16);
}

// kStream: where that writes whole lines, and not just one of three, past the caches.
template <bool kStream>
void copy_run(char* out, const char* in, int64_t bytes) {
  if (kStream && (bytes >= 4 * kLine || (is_line(out) && bytes % kLine == 0)))
    stream_copy(out, in, bytes);
  else
    copy_short(out, in, bytes);
}

// Copies [channels] x [columns] elements between two row views. T carries the element's size, not its type.
template <bool kStream, class T>
void copy_row(RowView from, RowView to, int64_t channels, int64_t columns) {
  constexpr int64_t kItem = sizeof(T);
  if (from.stride_c == 1 && to.stride_c == 1) {
    if (from.stride_x == channels && to.stride_x == channels)
      return copy_run<kStream>(to.data, from.data, columns * channels * kItem);
    for (int64_t x = 0; x < columns; ++x)
      copy_run<kStream>(to.data + x * to.stride_x * kItem, from.data + x * from.stride_x * kItem, channels * kItem);
    return;
  }
  if (from.stride_x == 1 && to.stride_x == 1) {
    for (int64_t c = 0; c < channels; ++c)
      copy_run<kStream>(to.data + c * to.stride_c * kItem, from.data + c * from.stride_c * kItem, columns * kItem);
    return;
  }
  const T* in = reinterpret_cast<const T*>(from.data);
  T* out = reinterpret_cast<T*>(to.data);
  const bool first_to_last = from.stride_x == 1 && to.stride_c == 1;
  if (first_to_last || (from.stride_c == 1 && to.stride_x == 1)) {
    int64_t at[kPixels];
    const int64_t step = first_to_last ? to.stride_x : from.stride_x;
    for (int64_t x = 0; x < columns && x < kPixels; ++x) at[x] = x * step;
    for (int64_t x = 0; x < columns; x += kPixels) {
      const int64_t pixels = columns - x < kPixels ? columns - x : kPixels;
      if (first_to_last)
        to_channels_last<kStream>(in + x, from.stride_c, out + x * step, at, pixels, channels, kTile);
      else
        to_channels_first<kStream>(out + x, to.stride_c, in + x * step, at, pixels, pixels, channels);
    }
    return;
  }
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t x = 0; x < columns; ++x)
      out[c * to.stride_c + x * to.stride_x] = in[c * from.stride_c + x * from.stride_x];
}

template <class T>
void zero_row(RowView to, int64_t channels, int64_t columns) {
  T* out = reinterpret_cast<T*>(to.data);
  const bool channels_inner = to.stride_c == 1;
  const int64_t outer = channels_inner ? columns : channels, inner = channels_inner ? channels : columns;
  for (int64_t o = 0; o < outer; ++o)
    std::memset(out + o * (channels_inner ? to.stride_x : to.stride_c), 0, static_cast<size_t>(inner) * sizeof(T));
}

template <class T>
RowView view(const TensorView& t, int64_t n, int64_t y, int64_t x, int64_t c = 0) {
  T* at = static_cast<T*>(t.data) + n * t.stride[0] + c * t.stride[1] + y * t.stride[2] + x * t.stride[3];
  return {reinterpret_cast<char*>(at), t.stride[1], t.stride[3]};
}

// The part of a block that lies on the plane: rows [row0, row1) and columns [column0, column1) of the block, the first
// of them at (n, y, x). None where the slot names no block.
struct BlockPart {
  int64_t n, y, x, row0, row1, column0, column1;
  bool whole(const BlockGrid& g) const { return row1 - row0 == g.size[0] && column1 - column0 == g.size[1]; }
};

BlockPart block_part(const BlockCopyParams& p, int64_t slot, int64_t count) {
  const BlockGrid& g = p.active.grid;
  for (int64_t row = 0; row < g.size[0]; ++row) {
    const BlockRow at = block_row(p, slot, row, count);
    if (at.inside0 == at.inside1) continue;
    const int64_t room = p.plane.size[2] - at.y, rows = g.size[0] - row < room ? g.size[0] - row : room;
    return {at.n, at.y, at.x + at.inside0, row, row + rows, at.inside0, at.inside1};
  }
  return {};
}

constexpr int64_t kTogether = 64;

// Between NCHW planes and stacks. Neighbouring blocks share pages and lines of the plane: some take turns at each
// channel. Where rows are whole lines that go past the caches, they take turns at each row.
template <bool kStream, class T>
void move_planes(const BlockCopyParams& p, const Parallel& parallel) {
  constexpr int64_t kItem = sizeof(T), kRun = 16;
  const bool gather = p.direction == CopyDirection::kGather;
  const int64_t height = p.active.grid.size[0], width = p.active.grid.size[1], channels = p.plane.size[1];
  const int64_t count = clamped_count(p), slots = gather && p.zero_tail ? p.blocks.size[0] : count;
  const bool by_rows = kStream && width * kItem % kLine == 0;
  const int64_t together = gather ? kTogether : by_rows ? 16 : 8;
  const int64_t runs = (channels + kRun - 1) / kRun, groups = (slots + together - 1) / together;
  const int64_t grain = 1 + 32768 / (together * kRun * height * width * kItem);
  parallel_for(parallel, groups * runs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t s0 = u / runs * together, here = slots - s0 < together ? slots - s0 : together;
      const int64_t c0 = u % runs * kRun, c1 = c0 + kRun < channels ? c0 + kRun : channels;
      BlockPart parts[kTogether];
      for (int64_t s = 0; s < here; ++s) parts[s] = block_part(p, s0 + s, count);
      const auto copy_rows = [&](int64_t s, int64_t c, int64_t begin_row, int64_t end_row) {
        const BlockPart& part = parts[s];
        const int64_t first = begin_row < part.row0 ? part.row0 : begin_row;
        const int64_t last = end_row < part.row1 ? end_row : part.row1;
        const int64_t bytes = (part.column1 - part.column0) * kItem;
        if (first >= last) return;
        char* plane = view<T>(p.plane, part.n, part.y + first - part.row0, part.x, c).data;
        char* block = view<T>(p.blocks, s0 + s, first, part.column0, c).data;
        for (int64_t r = first; r < last; ++r) {
          gather ? copy_run<false>(block, plane, bytes) : copy_run<kStream>(plane, block, bytes);
          plane += p.plane.stride[2] * kItem;
          block += p.blocks.stride[2] * kItem;
        }
      };
      for (int64_t c = c0; c < c1; ++c) {
        for (int64_t r = 0; by_rows && r < height; ++r)
          for (int64_t s = 0; s < here; ++s) copy_rows(s, c, r, r + 1);
        for (int64_t s = 0; !by_rows && s < here; ++s) {
          for (int64_t r = 0; gather && !parts[s].whole(p.active.grid) && r < height; ++r)
            zero_row<T>(view<T>(p.blocks, s0 + s, r, 0, c), 1, width);
          copy_rows(s, c, 0, height);
        }
      }
    }
    if (kStream) stream_fence();
  });
}

// A whole block inside the plane whose copy transposes; `at`: its pixels on the side that has channels last. Where the
// plane is that side, pixels follow each other across rows: a width of 18 leaves no parts of vectors over.
template <bool kStream, class T>
void transpose_block(const BlockCopyParams& p, T* plane, T* block, const int64_t* at, int64_t channels) {
  const int64_t width = p.active.grid.size[1], pixels = p.active.grid.size[0] * width;
  const bool gather = p.direction == CopyDirection::kGather;
  if (p.plane.stride[1] == 1) {
    if (gather)
      to_channels_first<kStream>(block, p.blocks.stride[1], plane, at, pixels, pixels, channels);
    else
      to_channels_last<kStream>(block, p.blocks.stride[1], plane, at, pixels, channels, 2 * kTile);
    return;
  }
  for (int64_t done = 0; done < pixels; done += width, at += width, plane += p.plane.stride[2]) {
    if (gather)
      to_channels_last<kStream>(plane, p.plane.stride[1], block, at, width, channels, p.plane.stride[2]);
    else
      to_channels_first<kStream>(plane, p.plane.stride[1], block, at, width, pixels - done, channels);
  }
}

// Gather and scatter without add. A unit of work is one row of all channels between channels_last sides, four cache
// lines of channels of a band of rows where the copy transposes.
template <bool kStream, class T>
void move(const BlockCopyParams& p, const Parallel& parallel) {
  const bool gather = p.direction == CopyDirection::kGather;
  const int64_t height = p.active.grid.size[0], width = p.active.grid.size[1], channels = p.plane.size[1];
  const int64_t count = clamped_count(p), slots = gather && p.zero_tail ? p.blocks.size[0] : count;
  const bool both_nhwc = p.plane.stride[1] == 1 && p.blocks.stride[1] == 1;
  if (!both_nhwc && p.plane.stride[3] == 1 && p.blocks.stride[3] == 1) return move_planes<kStream, T>(p, parallel);
  const bool plane_last = p.plane.stride[1] == 1;
  const TensorView &last = plane_last ? p.plane : p.blocks, &first = plane_last ? p.blocks : p.plane;
  const bool by_block = !both_nhwc && last.stride[1] == 1 && first.stride[3] == 1 && height * width <= kPixels &&
                        (!plane_last || p.blocks.stride[2] == width);
  const int64_t run = both_nhwc ? channels : 4 * kLine / static_cast<int64_t>(sizeof(T));
  const int64_t band = both_nhwc ? 1 : height < 64 || by_block ? height : 64;
  const int64_t runs = (channels + run - 1) / run, bands = (height + band - 1) / band;
  // Neighbouring blocks of an NCHW map share its pages and lines: some take turns at each run of channels.
  const int64_t together = plane_last ? 1 : gather ? 32 : 8;
  const int64_t grain = 1 + 32768 / (run * band * width * static_cast<int64_t>(sizeof(T)));
  parallel_for(parallel, slots * runs * bands, grain, [&](int64_t begin, int64_t end) {
    int64_t at[kPixels];  // of a block, where channels come last
    for (int64_t i = 0; by_block && i < height * width; ++i)
      at[i] = i / width * last.stride[2] + i % width * last.stride[3];
    for (int64_t u = begin; u < end; ++u) {
      const int64_t group = u / (together * runs * bands), within = u - group * together * runs * bands;
      const int64_t here = slots - group * together < together ? slots - group * together : together;
      const int64_t slot = group * together + within / bands % here;
      const int64_t row0 = within % bands * band, c0 = within / bands / here * run;
      const int64_t row1 = row0 + band < height ? row0 + band : height;
      const int64_t depth = channels - c0 < run ? channels - c0 : run;
      const BlockPart part = block_part(p, slot, count);
      if (by_block && part.whole(p.active.grid)) {
        char *plane = view<T>(p.plane, part.n, part.y, part.x, c0).data, *own = view<T>(p.blocks, slot, 0, 0, c0).data;
        transpose_block<kStream>(p, reinterpret_cast<T*>(plane), reinterpret_cast<T*>(own), at, depth);
        continue;
      }
      for (int64_t r = row0; r < row1; ++r) {
        const bool inside = r >= part.row0 && r < part.row1;
        const int64_t begin_x = inside ? part.column0 : width, end_x = inside ? part.column1 : width;
        if (gather && begin_x > 0) zero_row<T>(view<T>(p.blocks, slot, r, 0, c0), depth, begin_x);
        if (gather && end_x < width) zero_row<T>(view<T>(p.blocks, slot, r, end_x, c0), depth, width - end_x);
        if (!inside) continue;
        const RowView plane = view<T>(p.plane, part.n, part.y + r - part.row0, part.x, c0);
        const RowView own = view<T>(p.blocks, slot, r, begin_x, c0);
        copy_row<kStream, T>(gather ? plane : own, gather ? own : plane, depth, end_x - begin_x);
      }
    }
    if (kStream) stream_fence();
  });
}

// A gather's stack is usually fresh memory, whose pages the system has just cleared in the cache: streaming slows it.
template <class T>
void move(const BlockCopyParams& p, const Parallel& parallel) {
  const int64_t block = p.plane.size[1] * p.active.grid.size[0] * p.active.grid.size[1];
  const int64_t bytes = clamped_count(p) * block * static_cast<int64_t>(sizeof(T));
  if (p.direction == CopyDirection::kScatter && bytes >= kStreamBytes)
    move<true, T>(p, parallel);
  else
    move<false, T>(p, parallel);
}

template <class T>
void scatter_add(const BlockCopyParams& p, const Parallel& parallel) {
  const int64_t rows = p.active.grid.size[0], channels = p.plane.size[1], count = clamped_count(p);
  const auto add_rows = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = r / rows, row = r % rows;
      const BlockRow at = block_row(p, slot, row, count);
      for (int64_t x = at.inside0; x < at.inside1; ++x) {
        const RowView from = view<T>(p.blocks, slot, row, x), to = view<T>(p.plane, at.n, at.y, at.x + x);
        const T* in = reinterpret_cast<const T*>(from.data);
        T* out = reinterpret_cast<T*>(to.data);
        for (int64_t c = 0; c < channels; ++c) {
          T* o = out + c * to.stride_c;
          *o = from_float<T>(to_float(*o) + to_float(in[c * from.stride_c]));
        }
      }
    }
  };
  if (p.active.grid.overlaps())
    add_rows(0, count * rows);  // no map to sum by: one thread, so that no two meet
  else
    parallel_for(parallel, count * rows, 1 + 8192 / (p.active.grid.size[1] * channels + 1), add_rows);
}

// Overlapping blocks: each pixel adds the blocks over it in raster order, in float32, and rounds once (as CUDA does).
template <class T>
void overlap_add(const BlockCopyParams& p, const Parallel& parallel) {
  const BlockGrid& g = p.active.grid;
  const int64_t channels = p.plane.size[1], H = p.plane.size[2], W = p.plane.size[3], count = clamped_count(p);
  const auto covering = [&](int dim, int64_t v, int64_t* first, int64_t* last) {
    const int64_t t = v - g.offset[dim], s = t - g.size[dim] + 1;
    *last = t < 0 ? 0 : t / g.stride[dim] + 1 < g.count[dim] ? t / g.stride[dim] + 1 : g.count[dim];
    *first = s <= 0 ? 0 : (s + g.stride[dim] - 1) / g.stride[dim];
  };
  constexpr int64_t kChunk = 256;
  parallel_for(parallel, p.plane.size[0] * H, 1, [&](int64_t begin, int64_t end) {
    float sum[kChunk];
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = r / H, y = r % H;
      const int32_t* map = p.active.block_map + n * g.count[0] * g.count[1];
      int64_t i0, i1, j0, j1;
      covering(0, y, &i0, &i1);
      for (int64_t x = 0; x < W; ++x) {
        covering(1, x, &j0, &j1);
        T* out = reinterpret_cast<T*>(view<T>(p.plane, n, y, x).data);
        for (int64_t c0 = 0; c0 < channels; c0 += kChunk) {
          const int64_t c1 = channels - c0 < kChunk ? channels - c0 : kChunk;
          bool touched = false;
          for (int64_t i = i0; i < i1; ++i) {
            for (int64_t j = j0; j < j1; ++j) {
              const int64_t slot = map[i * g.count[1] + j];
              if (slot < 0 || slot >= count) continue;
              if (!touched)
                for (int64_t c = 0; c < c1; ++c) sum[c] = to_float(out[(c0 + c) * p.plane.stride[1]]);
              touched = true;
              const RowView from =
                  view<T>(p.blocks, slot, y - g.offset[0] - i * g.stride[0], x - g.offset[1] - j * g.stride[1]);
              const T* in = reinterpret_cast<const T*>(from.data);
              for (int64_t c = 0; c < c1; ++c) sum[c] += to_float(in[(c0 + c) * from.stride_c]);
            }
          }
          if (touched)
            for (int64_t c = 0; c < c1; ++c) out[(c0 + c) * p.plane.stride[1]] = from_float<T>(sum[c]);
        }
      }
    }
  });
}

template <class T>
void add(const BlockCopyParams& p, const Parallel& parallel) {
  if (p.active.grid.overlaps() && p.active.block_map)
    overlap_add<T>(p, parallel);
  else
    scatter_add<T>(p, parallel);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_block_copy_cpu(const sbnet::BlockCopyParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const BlockCopyParams& p = *params;
  SBNET_TRY(validate(p));
  if (p.blocks.size[0] == 0 || p.plane.size[1] == 0) return ok_status();
  if (p.add) {
    switch (p.plane.dtype) {
      case DType::kF32:
        add<float>(p, *parallel);
        break;
      case DType::kF16:
        add<Half>(p, *parallel);
        break;
      default:
        add<BFloat16>(p, *parallel);
        break;
    }
    return ok_status();
  }
  switch (dtype_size(p.plane.dtype)) {
    case 1:
      move<uint8_t>(p, *parallel);
      break;
    case 2:
      move<uint16_t>(p, *parallel);
      break;
    case 4:
      move<uint32_t>(p, *parallel);
      break;
    default:
      move<uint64_t>(p, *parallel);
      break;
  }
  return ok_status();
}
