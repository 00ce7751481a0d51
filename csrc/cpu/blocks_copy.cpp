// sparse_gather and sparse_scatter on the CPU. Both directions walk block rows: (slot, row of the block).
#include <cstring>

#include "core/blocks.h"
#include "cpu/half.h"
#include "cpu/stream.h"

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

// out[j][i] = in[i][j]; pitches in elements. Tiles of 16 x 16 keep the cache lines of both sides at hand.
// kStream: where that writes whole lines, past the caches.
template <bool kStream, class T>
void transpose(const T* in, int64_t in_pitch, T* out, int64_t out_pitch, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = 16, kItem = sizeof(T);
  const bool on_lines = kStream && kItem == 4 && is_line(out) && out_pitch * kItem % kLine == 0;
  alignas(64) T lines[kTile * kTile];  // a tile on its way: streamed lines are to be written in one go
  for (int64_t j0 = 0; j0 < columns; j0 += kTile) {
    const int64_t j1 = j0 + kTile < columns ? j0 + kTile : columns;
    for (int64_t i0 = 0; i0 < rows; i0 += kTile) {
      const int64_t i1 = i0 + kTile < rows ? i0 + kTile : rows;
      const bool stream = on_lines && i1 - i0 == kTile;
      T* const to = stream ? lines : out + j0 * out_pitch + i0;
      const int64_t pitch = stream ? kTile : out_pitch;
      int64_t j = j0;
      if constexpr (sizeof(T) == 4) {  // four vectors of four at a time
        typedef uint32_t Quad __attribute__((vector_size(16)));
        for (; j + 4 <= j1; j += 4) {
          int64_t i = i0;
          for (; i + 4 <= i1; i += 4) {
            Quad a[4];
            for (int r = 0; r < 4; ++r) {
              const T* at = in + (i + r) * in_pitch + j;
              std::memcpy(&a[r], at, 16);
              if (kStream && j % kTile == 0) __builtin_prefetch(at + rows * in_pitch, 0, 2);  // the run after this one
            }
            const Quad low01 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
            const Quad low23 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
            const Quad high01 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
            const Quad high23 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
            const Quad b[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
                               __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                               __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                               __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
            for (int r = 0; r < 4; ++r) std::memcpy(to + (j - j0 + r) * pitch + i - i0, &b[r], 16);
          }
          for (; i < i1; ++i)
            for (int r = 0; r < 4; ++r) to[(j - j0 + r) * pitch + i - i0] = in[i * in_pitch + j + r];
        }
      }
      for (; j < j1; ++j)
        for (int64_t i = i0; i < i1; ++i) to[(j - j0) * pitch + i - i0] = in[i * in_pitch + j];
      for (j = j0; stream && j < j1; ++j) stream_line(out + j * out_pitch + i0, lines + (j - j0) * kTile);
    }
  }
}

// Copies [channels] x [columns] elements between two row views. T carries the element's size, not its type.
template <bool kStream, class T>
void copy_row(RowView from, RowView to, int64_t channels, int64_t columns) {
  const auto copy = [](char* out, const char* in, int64_t bytes) {
    kStream ? stream_copy(out, in, bytes) : static_cast<void>(std::memcpy(out, in, static_cast<size_t>(bytes)));
  };
  constexpr int64_t kItem = sizeof(T);
  if (from.stride_c == 1 && to.stride_c == 1) {
    if (from.stride_x == channels && to.stride_x == channels)
      return copy(to.data, from.data, columns * channels * kItem);
    for (int64_t x = 0; x < columns; ++x)
      copy(to.data + x * to.stride_x * kItem, from.data + x * from.stride_x * kItem, channels * kItem);
    return;
  }
  if (from.stride_x == 1 && to.stride_x == 1) {
    for (int64_t c = 0; c < channels; ++c)
      copy(to.data + c * to.stride_c * kItem, from.data + c * from.stride_c * kItem, columns * kItem);
    return;
  }
  const T* in = reinterpret_cast<const T*>(from.data);
  T* out = reinterpret_cast<T*>(to.data);
  if (from.stride_c == 1 && to.stride_x == 1)
    return transpose<kStream>(in, from.stride_x, out, to.stride_c, columns, channels);
  if (from.stride_x == 1 && to.stride_c == 1)
    return transpose<kStream>(in, from.stride_c, out, to.stride_x, channels, columns);
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
RowView view(const TensorView& t, int64_t n, int64_t y, int64_t x) {
  return {reinterpret_cast<char*>(static_cast<T*>(t.data) + n * t.stride[0] + y * t.stride[2] + x * t.stride[3]),
          t.stride[1], t.stride[3]};
}

// Gather and scatter without add. A unit of work is a band of rows and a run of channels of one block, chosen so that
// both sides are walked in long stretches: one row of all channels between channels_last sides, one channel between
// NCHW sides, four cache lines of channels where the copy transposes.
template <bool kStream, class T>
void move(const BlockCopyParams& p, const Parallel& parallel) {
  const bool gather = p.direction == CopyDirection::kGather;
  const int64_t height = p.active.grid.size[0], width = p.active.grid.size[1], channels = p.plane.size[1];
  const int64_t count = clamped_count(p), slots = gather && p.zero_tail ? p.blocks.size[0] : count;
  const bool both_nhwc = p.plane.stride[1] == 1 && p.blocks.stride[1] == 1;
  const bool both_nchw = p.plane.stride[3] == 1 && p.blocks.stride[3] == 1;
  const int64_t run = both_nhwc ? channels : both_nchw ? 1 : 4 * kLine / static_cast<int64_t>(sizeof(T));
  const int64_t band = both_nhwc ? 1 : height < 64 ? height : 64;
  const int64_t runs = (channels + run - 1) / run, bands = (height + band - 1) / band;
  // Neighbouring blocks of an NCHW map share its pages and lines: some take turns at each channel.
  const int64_t together = p.plane.stride[1] == 1 ? 1 : gather ? 32 : 8;
  const int64_t grain = 1 + 32768 / (run * band * width * static_cast<int64_t>(sizeof(T)));
  parallel_for(parallel, slots * runs * bands, grain, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t group = u / (together * runs * bands), within = u - group * together * runs * bands;
      const int64_t slots_here = slots - group * together < together ? slots - group * together : together;
      const int64_t slot = group * together + within / bands % slots_here;
      const int64_t row0 = within % bands * band, c0 = within / bands / slots_here * run;
      const int64_t row1 = row0 + band < height ? row0 + band : height,
                    depth = channels - c0 < run ? channels - c0 : run;
      // Which columns lie on the plane is the same for every row that does.
      int64_t row = row0;
      BlockRow at = block_row(p, slot, row, count);
      while (at.inside0 == at.inside1 && ++row < row1) at = block_row(p, slot, row, count);
      const bool any = at.inside0 < at.inside1;
      const int64_t first = any ? row : row1;
      const int64_t last = any ? (p.plane.size[2] - at.y < row1 - row ? row + p.plane.size[2] - at.y : row1) : row1;
      const auto stack = [&](int64_t r, int64_t x) {
        RowView v = view<T>(p.blocks, slot, r, x);
        v.data += c0 * v.stride_c * static_cast<int64_t>(sizeof(T));
        return v;
      };
      for (int64_t r = row0; gather && r < row1; ++r) {
        const bool inside = r >= first && r < last;
        if (!inside || at.inside0 > 0) zero_row<T>(stack(r, 0), depth, inside ? at.inside0 : width);
        if (inside && at.inside1 < width) zero_row<T>(stack(r, at.inside1), depth, width - at.inside1);
      }
      for (int64_t r = first; r < last; ++r) {
        RowView plane = view<T>(p.plane, at.n, at.y + r - first, at.x + at.inside0);
        plane.data += c0 * plane.stride_c * static_cast<int64_t>(sizeof(T));
        const RowView own = stack(r, at.inside0);
        copy_row<kStream, T>(gather ? plane : own, gather ? own : plane, depth, at.inside1 - at.inside0);
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
