#include "core/lists/pyramid.h"

#include <algorithm>

#include "core/grid.h"
#include "core/lists/reduce_mask.h"

namespace sbnet {
namespace {

constexpr const char* kOp = "mask_pyramid";
constexpr int kStripRows = 64;

int greatest_common_divisor(int a, int b) {
  while (b) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

constexpr int64_t kMost = 1 << 16;  // planes, fringes, consumers: more is a mistake

}  // namespace

Status count_pyramid(const PyramidNumbers& n, int64_t* planes, int64_t* fringes, int64_t* consumers) {
  *planes = n.plane_numbers / 4, *fringes = *consumers = 0;
  SBNET_CHECK(n.plane_numbers % 4 == 0 && *planes <= kMost,
              "%s: planes: expected four numbers a plane and at most %lld planes, got %lld numbers", kOp,
              static_cast<long long>(kMost), static_cast<long long>(n.plane_numbers));
  constexpr int64_t kNumbers = 1 + kWindowNumbers;  // of a consumer
  for (int64_t at = 0; at < n.fringe_numbers; at += 2 + kNumbers * n.fringes[at + 1], ++*fringes) {
    const int64_t left = n.fringe_numbers - at - 2;
    SBNET_CHECK(left >= 0 && n.fringes[at + 1] >= 1 && n.fringes[at + 1] <= left / kNumbers,
                "%s: fringes: fringe %lld is cut short: expected a plane, the number of consumers (at least 1) and "
                "eleven numbers for each of them",
                kOp, static_cast<long long>(*fringes));
    *consumers += n.fringes[at + 1];
    SBNET_CHECK(*consumers <= kMost, "%s: fringes: expected at most %lld consumers, got more", kOp,
                static_cast<long long>(kMost));
  }
  return ok_status();
}

Status read_pyramid(const PyramidNumbers& n, PyramidParams* p) {
  p->planes = static_cast<int32_t>(n.plane_numbers / 4);
  for (int k = 0; k < p->planes; ++k) {
    const int64_t* v = n.planes + 4 * k;
    SBNET_CHECK(v[0] >= 1 && v[1] >= 1 && v[2] >= 1 && v[3] >= 1 && v[0] <= (1 << 29) && v[1] <= (1 << 29) &&
                    v[2] <= (1 << 29) && v[3] <= (1 << 29),
                "%s: planes[%d]: expected sides of 1 to 2^29, got %lldx%lld pixels in blocks of %lldx%lld", kOp, k,
                static_cast<long long>(v[0]), static_cast<long long>(v[1]), static_cast<long long>(v[2]),
                static_cast<long long>(v[3]));
    const int32_t block[2] = {static_cast<int32_t>(v[2]), static_cast<int32_t>(v[3])};
    p->plane[k].tiles = TiledPlane(v[0], v[1], block);
  }
  const auto plane_index = [&](int64_t plane) {
    SBNET_CHECK(plane >= 0 && plane < p->planes, "%s: fringes: fringe %d: expected one of the %d planes, got %lld", kOp,
                p->fringes, p->planes, static_cast<long long>(plane));
    return ok_status();
  };
  p->fringes = 0;
  int consumers = 0;
  for (int64_t at = 0; at < n.fringe_numbers; ++p->fringes) {
    PyramidFringe& f = p->fringe[p->fringes];
    SBNET_TRY(plane_index(n.fringes[at]));
    f.plane = static_cast<int32_t>(n.fringes[at]);
    f.consumers = static_cast<int32_t>(n.fringes[at + 1]);
    f.first_consumer = consumers;
    at += 2;
    for (int r = 0; r < f.consumers; ++r, at += 1 + kWindowNumbers) {
      PyramidConsumer& consumer = p->consumer[consumers++];
      SBNET_TRY(plane_index(n.fringes[at]));
      consumer.plane = static_cast<int32_t>(n.fringes[at]);
      int64_t numbers[kWindowNumbers];
      for (int k = 0; k < kWindowNumbers; ++k) numbers[k] = n.fringes[at + 1 + k];
      SBNET_TRY(read_window(kOp, numbers, &consumer.window));
    }
  }
  return ok_status();
}

Status validate(const PyramidParams& p) {
  SBNET_TRY(check_mask(kOp, p.mask_dtype, p.size, p.stride));
  SBNET_CHECK(p.size[1] >= 1 && p.size[2] >= 1 && p.size[1] <= (1 << 29) && p.size[2] <= (1 << 29),
              "%s: mask: expected sides of 1 to 2^29, got %lldx%lld pixels", kOp, static_cast<long long>(p.size[1]),
              static_cast<long long>(p.size[2]));
  SBNET_CHECK(p.margin >= 0 && p.margin <= (1 << 29), "%s: margin: expected 0 to 2^29 pixels, got %lld", kOp,
              static_cast<long long>(p.margin));
  for (int k = 0; k < p.planes; ++k) {
    const TiledPlane& t = p.plane[k].tiles;
    SBNET_TRY(check_listable(kOp, p.size[0], t.size[0], t.size[1]));
    SBNET_CHECK(p.blocks(k) <= INT32_MAX / 4, "%s: planes: expected at most 2^29 blocks a plane, got %lld in plane %d",
                kOp, static_cast<long long>(p.blocks(k)), k);
  }
  for (int k = 0; k < p.fringes; ++k) {
    const PyramidFringe& f = p.fringe[k];
    const TiledPlane& own = p.plane[f.plane].tiles;
    const int64_t size[2] = {own.size[0], own.size[1]};
    for (int r = 0; r < f.consumers; ++r) {
      const PyramidConsumer& consumer = p.consumer[f.first_consumer + r];
      const TiledPlane& out = p.plane[consumer.plane].tiles;
      const int64_t out_size[2] = {out.size[0], out.size[1]};
      SBNET_TRY(check_window(kOp, consumer.window, size, out_size));
    }
  }
  return ok_status();
}

int64_t pyramid_table_words(const PyramidParams& p) {
  int64_t entries = p.planes + int64_t{2} * p.fringes + 4;
  for (int k = 0; k < p.fringes; ++k) entries += p.fringe[k].consumers;
  return entries * kPyramidTableEntry / 4;
}

int pyramid_strip(const PyramidParams& p) {
  const int side = static_cast<int>(p.size[1]);
  int strip = side;
  for (int k = 0; k < p.planes && strip > 1; ++k) {
    const TiledPlane& t = p.plane[k].tiles;
    for (int i = 0; i < t.count[0] && strip > 1; ++i) {
      const Span s = pyramid_span(t, 0, i, side, static_cast<int>(p.margin));
      strip = greatest_common_divisor(strip, s.begin);
      if (s.end < side) strip = greatest_common_divisor(strip, s.end);
    }
  }
  if (strip <= kStripRows) return strip;
  int rows = kStripRows;
  while (strip % rows) --rows;
  return rows;
}

}  // namespace sbnet

// CPU: a byte for each column of a strip, for each block, and for each column of the strips that a row of blocks sees;
// then the words of one fringe after the other. CUDA: the first two as words of bits, a count for each 32 words of a
// fringe, and the tables.
int64_t sbnet_mask_pyramid_workspace_bytes(const sbnet::PyramidParams* p) {
  const int64_t strip = sbnet::pyramid_strip(*p), strips = p->size[0] * ((p->size[1] + strip - 1) / strip);
  const int64_t mask_words = (p->size[2] + 31) / 32 * 8;
  int64_t words = strips * mask_words, rows = 0;
  for (int k = 0; k < p->planes; ++k) {
    const sbnet::TiledPlane& t = p->plane[k].tiles;
    words += p->size[0] * t.count[0] * ((t.count[1] + 31) / 32) * 8;
    rows = std::max(rows, p->size[0] * t.count[0]);
  }
  words += rows * mask_words;
  for (int k = 0; k < p->fringes; ++k) {
    const sbnet::TiledPlane& t = p->plane[p->fringe[k].plane].tiles;
    const int64_t own = p->size[0] * t.size[0] * t.words();
    words += own + own / 32 + 1;
  }
  return (words + sbnet::pyramid_table_words(*p)) * 4;
}
