// Sums, maxima and moments over the active pixels of a plane's windows, one number a channel: how the work is cut. A
// window's blocks are dealt out to slices, a part is one slice of one window. What parts found is merged in order, so
// that results do not depend on which of them ended first.
#pragma once
#include "core/types.h"

namespace sbnet {

enum class FoldKind : int32_t { kSum, kMax, kMoments };
// Numbers a channel: the sum, the largest, or the mean and the sum of squared distances from it.
SBNET_HOST_DEVICE constexpr int fold_values(FoldKind kind) { return kind == FoldKind::kMoments ? 2 : 1; }

struct PixelRect {
  int32_t row, row_end, column, column_end;
};

// Window (i, j) covers rows floor(i * H / windows[0]) to ceil((i + 1) * H / windows[0]), and columns likewise.
struct FoldParts {
  TensorView x;              // [N, C, H, W]
  const int32_t* block_map;  // [N, grid.count[0], grid.count[1]] active iff not negative
  BlockGrid grid;            // tiling grid of the plane
  int32_t windows[2];
  int32_t slices;

  SBNET_HOST_DEVICE int64_t all_windows() const { return x.size[0] * windows[0] * windows[1]; }
  SBNET_HOST_DEVICE int64_t count() const { return all_windows() * slices; }
};

// Deals the blocks of a window out to slices: enough parts for a GPU, of enough pixels each.
inline void deal(FoldParts* p) {
  constexpr int64_t kPixels = 1024, kMostSlices = 256;
  int64_t blocks = 1, pixels = 1;
  for (int d = 0; d < 2; ++d) {
    const int64_t side = (p->x.size[2 + d] + p->windows[d] - 1) / p->windows[d] + 1;  // of the largest window, at most
    blocks *= (side + p->grid.size[d] - 1) / p->grid.size[d] + 1;
    pixels *= p->grid.size[d] < side ? p->grid.size[d] : side;
  }
  const int64_t together = pixels < kPixels ? kPixels / pixels : 1;  // blocks that a slice has at least
  const int64_t slices = (blocks + together - 1) / together;
  p->slices = static_cast<int32_t>(slices < kMostSlices ? slices : kMostSlices);
}

// What parts found: `values` [parts, fold_values, C], then `counts` [parts] of pixels.
inline int64_t fold_bytes(const FoldParts& p, FoldKind kind) {
  const int64_t floats = size_product({p.all_windows(), p.slices, fold_values(kind) * p.x.size[1] + 1});
  return floats <= INT64_MAX / 4 ? floats * 4 : INT64_MAX;
}
inline float* fold_counts(const FoldParts& p, FoldKind kind, void* workspace) {
  return static_cast<float*>(workspace) + p.count() * fold_values(kind) * p.x.size[1];
}

// Goes through the active blocks of a part, as far as they lie in its window.
class BlockWalk {
 public:
  SBNET_HOST_DEVICE BlockWalk(const FoldParts& p, int64_t part) : p_(p) {
    at_ = part % p.slices;
    int64_t window = part / p.slices;
    for (int d = 1; d >= 0; --d) {
      const int64_t index = window % p.windows[d], side = p.x.size[2 + d];
      window /= p.windows[d];
      begin_[d] = static_cast<int32_t>(index * side / p.windows[d]);
      end_[d] = static_cast<int32_t>(((index + 1) * side + p.windows[d] - 1) / p.windows[d]);
      first_[d] = begin_[d] / p.grid.size[d];
      blocks_[d] = (end_[d] - 1) / p.grid.size[d] + 1 - first_[d];
    }
    image_ = window;
  }
  SBNET_HOST_DEVICE int64_t image() const { return image_; }
  SBNET_HOST_DEVICE int64_t pixels() const { return int64_t{end_[0] - begin_[0]} * (end_[1] - begin_[1]); }

  // The next block's pixels; false after the last.
  SBNET_HOST_DEVICE bool next(PixelRect* rect) {
    const BlockGrid& grid = p_.grid;
    for (; at_ < int64_t{blocks_[0]} * blocks_[1]; at_ += p_.slices) {
      const int32_t i = first_[0] + static_cast<int32_t>(at_ / blocks_[1]);
      const int32_t j = first_[1] + static_cast<int32_t>(at_ % blocks_[1]);
      if (p_.block_map[(image_ * grid.count[0] + i) * grid.count[1] + j] < 0) continue;
      *rect = {inside(0, i), inside(0, i + 1), inside(1, j), inside(1, j + 1)};
      at_ += p_.slices;
      return true;
    }
    return false;
  }

 private:
  // Where block b of an axis begins, within the window.
  SBNET_HOST_DEVICE int32_t inside(int d, int32_t b) const {
    const int64_t at = int64_t{b} * p_.grid.size[d];
    return static_cast<int32_t>(at < begin_[d] ? begin_[d] : at > end_[d] ? end_[d] : at);
  }

  const FoldParts& p_;
  int64_t image_, at_;
  int32_t begin_[2], end_[2], first_[2], blocks_[2];
};

}  // namespace sbnet
