// mask_pyramid on the CPU: the mask is read once, into a byte for each column of a strip of rows; the strips that a row
// of blocks sees become one, and a block searches its columns there. Lists follow in one pass a plane, and fringes by
// words as in fringe.cpp.
#include "core/lists/pyramid.h"

#include <cstring>
#include <vector>

#include "cpu/lists/fringe.h"
#include "cpu/lists/mask.h"

namespace sbnet {
namespace {

// What a thread takes at least: less is sooner done than handed out.
constexpr int64_t kMaskPixels = 1 << 17, kMaskBlocks = 1 << 12;

// out |= row > tol, of bytes that follow each other: compared as bytes, sixteen at a time.
void mark_above(const uint8_t* row, int64_t width, double tol, uint8_t* out) {
  const float least = static_cast<float>(tol);
  if (!(least < 255.f)) return;
  if (least < 0.f) {
    std::memset(out, 1, static_cast<size_t>(width));
    return;
  }
  const uint8_t limit = static_cast<uint8_t>(least);
  for (int64_t x = 0; x < width; ++x) out[x] |= row[x] > limit;
}
template <class T>
void mark_above(const T* row, int64_t width, double tol, uint8_t* out) {
  for (int64_t x = 0; x < width; ++x) out[x] |= above(row[x], tol);
}

template <class T>
void reduce_strips(const PyramidParams& p, int strip, uint8_t* bytes, const Parallel& parallel) {
  const int64_t width = p.size[2], strips = (p.size[1] + strip - 1) / strip;
  parallel_for(parallel, p.size[0] * strips, 1 + kMaskPixels / (width * strip), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      uint8_t* out = bytes + s * width;
      std::memset(out, 0, static_cast<size_t>(width));
      const int64_t y0 = s % strips * strip, y1 = y0 + strip < p.size[1] ? y0 + strip : p.size[1];
      for (int64_t y = y0; y < y1; ++y) {
        const T* row = static_cast<const T*>(p.mask) + s / strips * p.stride[0] + y * p.stride[1];
        if (p.stride[2] == 1)
          mark_above(row, width, p.tol, out);
        else
          for (int64_t x = 0; x < width; ++x) out[x] |= above(row[x * p.stride[2]], p.tol);
      }
    }
  });
}

// What of a column is set in any of the strips, [width]: `room` where they are several.
const uint8_t* united(const uint8_t* strips, int64_t count, int64_t width, uint8_t* room) {
  if (count == 1) return strips;
  std::memcpy(room, strips, static_cast<size_t>(width));
  for (int64_t s = 1; s < count; ++s)
    for (int64_t x = 0; x < width; ++x) room[x] |= strips[s * width + x];
  return room;
}

// room: [images * rows of blocks, width].
void list_plane(const PyramidParams& p, const PyramidPlane& plane, const uint8_t* bytes, int strip, uint8_t* active,
                uint8_t* room, const Parallel& parallel) {
  const TiledPlane& t = plane.tiles;
  const int height = static_cast<int>(p.size[1]), width = static_cast<int>(p.size[2]);
  const int strips = (height + strip - 1) / strip, margin = static_cast<int>(p.margin);
  parallel_for(parallel, p.size[0] * t.count[0], 1 + kMaskBlocks / t.count[1], [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Span rows = pyramid_span(t, 0, static_cast<int>(r % t.count[0]), height, margin);
      const int64_t first = r / t.count[0] * strips + rows.begin / strip;
      const int count = (rows.end + strip - 1) / strip - rows.begin / strip;
      const uint8_t* seen = united(bytes + first * width, count, width, room + r * width);
      for (int j = 0; j < t.count[1]; ++j) {
        const Span columns = pyramid_span(t, 1, j, width, margin);
        active[r * t.count[1] + j] =
            std::memchr(seen + columns.begin, 1, static_cast<size_t>(columns.end - columns.begin)) != nullptr;
      }
    }
  });
  const int64_t blocks = p.size[0] * t.count[0] * t.count[1];
  *plane.count = *plane.total = list_blocks(active, p.size[0], t.count, blocks, plane.block_map, plane.indices);
}

void list_fringe(const PyramidParams& p, const PyramidFringe& fringe, uint32_t* words, const Parallel& parallel) {
  const TiledPlane& mine = p.plane[fringe.plane].tiles;
  const int64_t rows = p.size[0] * mine.size[0], words_per_row = mine.words();
  const auto lookup = [&](int plane, int64_t n) {
    const TiledPlane& t = p.plane[plane].tiles;
    return MapLookup{p.plane[plane].block_map + n * t.count[0] * t.count[1], t.count[1]};
  };
  const PyramidConsumer* consumers = p.consumer + fringe.first_consumer;
  std::vector<Reader> readers;
  for (int k = 0; k < fringe.consumers; ++k) readers.emplace_back(consumers[k].window);
  parallel_for(parallel, rows, 1 + kFringePixels / mine.size[1], [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = r / mine.size[0];
      const int y = static_cast<int>(r % mine.size[0]);
      uint32_t* row = words + r * words_per_row;
      bool leads = r == begin;
      for (int k = 0; k < fringe.consumers && !leads; ++k)
        leads = differs_from_row_above(mine, p.plane[consumers[k].plane].tiles, readers[k], y);
      if (!leads) {
        std::memcpy(row, row - words_per_row, sizeof(uint32_t) * static_cast<size_t>(words_per_row));
        continue;
      }
      const MapLookup own = lookup(fringe.plane, n);
      for (int k = 0; k < fringe.consumers; ++k) {
        const TiledPlane& out = p.plane[consumers[k].plane].tiles;
        const MapLookup theirs = lookup(consumers[k].plane, n);
        for (int w = 0; w < words_per_row; ++w) {
          const uint32_t found = k ? row[w] : 0, wanted = unwritten(mine, own, y, w * 32) & ~found;
          row[w] = found | read_by(out, readers[k], theirs, y, w * 32, wanted);
        }
      }
    }
  });
  list_pixels(words, rows, mine.size[1], rows * mine.size[1], p.kept, fringe.pixels, fringe.count);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_mask_pyramid_cpu(const sbnet::PyramidParams* params, void* workspace,
                                     const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const PyramidParams& p = *params;
  SBNET_TRY(validate(p));
  const int strip = pyramid_strip(p);
  uint8_t* bytes = static_cast<uint8_t*>(workspace);
  by_mask_dtype<Half, BFloat16>(p.mask_dtype, [&](auto t) { reduce_strips<decltype(t)>(p, strip, bytes, *parallel); });
  uint8_t* active = bytes + p.size[0] * ((p.size[1] + strip - 1) / strip) * p.size[2];
  for (int k = 0; k < p.planes; ++k) list_plane(p, p.plane[k], bytes, strip, active, active + p.blocks(k), *parallel);
  for (int k = 0; k < p.fringes; ++k)  // the scratch of the planes has served
    list_fringe(p, p.fringe[k], static_cast<uint32_t*>(workspace), *parallel);
  return ok_status();
}
