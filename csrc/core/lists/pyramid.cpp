#include "core/lists/pyramid.h"

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

bool fits(int64_t v) { return v >= 0 && v <= INT32_MAX; }

}  // namespace

Status read_pyramid(PyramidParams* p, const int64_t* planes, int64_t plane_numbers, const int64_t* fringes,
                    int64_t fringe_numbers) {
  SBNET_CHECK(plane_numbers % 4 == 0 && plane_numbers / 4 <= kMaxPyramidPlanes,
              "%s: planes: %lld numbers; four a plane and at most %d planes are wanted", kOp,
              static_cast<long long>(plane_numbers), kMaxPyramidPlanes);
  p->planes = static_cast<int32_t>(plane_numbers / 4);
  for (int k = 0; k < p->planes; ++k) {
    const int64_t* v = planes + 4 * k;
    SBNET_CHECK(v[0] >= 1 && v[1] >= 1 && v[2] >= 1 && v[3] >= 1 && v[0] <= (1 << 29) && v[1] <= (1 << 29) &&
                    v[2] <= (1 << 29) && v[3] <= (1 << 29),
                "%s: planes: plane %d of %lldx%lld pixels in blocks of %lldx%lld; 1 to 2^29 is wanted", kOp, k,
                static_cast<long long>(v[0]), static_cast<long long>(v[1]), static_cast<long long>(v[2]),
                static_cast<long long>(v[3]));
    const int32_t block[2] = {static_cast<int32_t>(v[2]), static_cast<int32_t>(v[3])};
    p->plane[k].tiles = TiledPlane(v[0], v[1], block);
  }
  p->fringes = 0;
  int consumers = 0;
  for (int64_t at = 0; at < fringe_numbers; ++p->fringes) {
    SBNET_CHECK(fringe_numbers - at >= 2 && fringes[at + 1] >= 1 && fringes[at + 1] <= (fringe_numbers - at - 2) / 9,
                "%s: fringes: fringe %d is cut short; a plane, the number of consumers (at least 1) and nine numbers "
                "for each of them are wanted",
                kOp, p->fringes);
    SBNET_CHECK(p->fringes < kMaxPyramidFringes && consumers + fringes[at + 1] <= kMaxPyramidConsumers,
                "%s: fringes: at most %d fringes with %d consumers in all are wanted", kOp, kMaxPyramidFringes,
                kMaxPyramidConsumers);
    PyramidFringe& f = p->fringe[p->fringes];
    f.consumers = static_cast<int32_t>(fringes[at + 1]);
    f.first_consumer = consumers;
    for (int64_t k = 0; k < 2 + int64_t{9} * f.consumers; ++k)
      SBNET_CHECK(fits(fringes[at + k]), "%s: fringes: fringe %d: %lld; 0 to 2^31 - 1 is wanted", kOp, p->fringes,
                  static_cast<long long>(fringes[at + k]));
    f.plane = static_cast<int32_t>(fringes[at]);
    at += 2;
    for (int r = 0; r < f.consumers; ++r, at += 9) {
      PyramidConsumer& consumer = p->consumer[consumers++];
      consumer.plane = static_cast<int32_t>(fringes[at]);
      for (int d = 0; d < 2; ++d) {
        consumer.window.kernel[d] = static_cast<int32_t>(fringes[at + 1 + d]);
        consumer.window.stride[d] = static_cast<int32_t>(fringes[at + 3 + d]);
        consumer.window.padding[d] = static_cast<int32_t>(fringes[at + 5 + d]);
        consumer.window.dilation[d] = static_cast<int32_t>(fringes[at + 7 + d]);
      }
    }
  }
  return ok_status();
}

Status validate(const PyramidParams& p) {
  SBNET_TRY(check_mask(kOp, p.mask_dtype, p.size, p.stride));
  SBNET_CHECK(p.size[1] >= 1 && p.size[2] >= 1 && p.size[1] <= (1 << 29) && p.size[2] <= (1 << 29),
              "%s: mask: %lld x %lld pixels; sides of 1 to 2^29 are wanted", kOp, static_cast<long long>(p.size[1]),
              static_cast<long long>(p.size[2]));
  for (int k = 0; k < p.planes; ++k) {
    const TiledPlane& t = p.plane[k].tiles;
    SBNET_TRY(check_listable(kOp, p.size[0], t.size[0], t.size[1]));
    SBNET_CHECK(p.blocks(k) <= INT32_MAX / 4, "%s: planes: %lld blocks in plane %d; at most 2^29 are wanted", kOp,
                static_cast<long long>(p.blocks(k)), k);
  }
  for (int k = 0; k < p.fringes; ++k) {
    const PyramidFringe& f = p.fringe[k];
    for (int r = -1; r < f.consumers; ++r) {
      const int plane = r < 0 ? f.plane : p.consumer[f.first_consumer + r].plane;
      SBNET_CHECK(plane >= 0 && plane < p.planes, "%s: fringes: fringe %d: plane %d; one of the %d planes is wanted",
                  kOp, k, plane, p.planes);
    }
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

int pyramid_strip(const PyramidParams& p) {
  const int side = static_cast<int>(p.size[1]);
  int strip = side;
  for (int k = 0; k < p.planes && strip > 1; ++k) {
    const TiledPlane& t = p.plane[k].tiles;
    for (int i = 0; i < t.count[0] && strip > 1; ++i) {
      const Span s = pyramid_span(t, 0, i, side);
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

// CPU: a byte for each column of a strip and for each block, then the words of one fringe after the other. CUDA: the
// same as words of bits, and a count for each 32 words of a fringe.
int64_t sbnet_mask_pyramid_workspace_bytes(const sbnet::PyramidParams* p) {
  const int64_t strip = sbnet::pyramid_strip(*p), strips = p->size[0] * ((p->size[1] + strip - 1) / strip);
  int64_t words = strips * ((p->size[2] + 31) / 32) * 8;
  for (int k = 0; k < p->planes; ++k) {
    const sbnet::TiledPlane& t = p->plane[k].tiles;
    words += p->size[0] * t.count[0] * ((t.count[1] + 31) / 32) * 8;
  }
  for (int k = 0; k < p->fringes; ++k) {
    const sbnet::TiledPlane& t = p->plane[p->fringe[k].plane].tiles;
    const int64_t own = p->size[0] * t.size[0] * t.words();
    words += own + own / 32 + 1;
  }
  return words * 4;
}
