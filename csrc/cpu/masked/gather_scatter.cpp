// sparse_gather and sparse_scatter on the CPU: the entry, and scatter with add. Copies are in blocks_move.h.
#include "core/masked/gather_scatter.h"

#include "core/by_dtype.h"
#include "cpu/masked/gather_scatter_kernels.h"
#include "cpu/masked/gather_scatter_walk.h"
#include "cpu/simd/half.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

template <class T>
void scatter_add(const BlockCopyParams& p, const Parallel& parallel) {
  const int64_t rows = p.active.grid.size[0], channels = p.plane.size[1], count = clamped_count(p);
  const auto add_rows = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = r / rows, row = r % rows;
      const BlockPart part = block_part(p, slot, count);
      if (row < part.row0 || row >= part.row1) continue;
      for (int64_t x = part.column0; x < part.column1; ++x) {
        const T* in = element<T>(p.blocks, slot, 0, row, x);
        T* out = element<T>(p.plane, part.n, 0, part.y + row, part.x + x);
        for (int64_t c = 0; c < channels; ++c) {
          T* o = out + c * p.plane.stride[1];
          *o = from_float<T>(to_float(*o) + to_float(in[c * p.blocks.stride[1]]));
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
        T* out = element<T>(p.plane, n, 0, y, x);
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
              const T* in =
                  element<T>(p.blocks, slot, c0, y - g.offset[0] - i * g.stride[0], x - g.offset[1] - j * g.stride[1]);
              for (int64_t c = 0; c < c1; ++c) sum[c] += to_float(in[c * p.blocks.stride[1]]);
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
    by_dtype<Half, BFloat16>(p.plane.dtype, [&](auto t) { add<decltype(t)>(p, *parallel); });
    return ok_status();
  }
  SBNET_FROM(Avx512, kBlockMove)(p, *parallel, dtype_size(p.plane.dtype));
  return ok_status();
}
