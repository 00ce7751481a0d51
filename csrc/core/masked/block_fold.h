// Sums, maxima and moments over the active pixels of a plane's windows, one number a channel: how the work is cut. A
// block's rows are cut into bands; a window's bands are dealt out to slices, a part is one slice of one window. What
// parts found is merged in order, so that results do not depend on which of them ended first.
#pragma once
#include "core/types.h"

namespace sbnet {

enum class FoldKind : int32_t { kSum, kMax, kMoments, kGradient };
// Numbers a channel: the sum, the largest, or the mean and the sum of squared distances from it; with a gradient also
// its sum, and that of its products with those distances.
SBNET_HOST_DEVICE constexpr int fold_values(FoldKind kind) {
  return kind == FoldKind::kGradient ? 4 : kind == FoldKind::kMoments ? 2 : 1;
}

struct PixelRect {
  int32_t row, row_end, column, column_end;
};

// Window (i, j) covers rows floor(i * H / windows[0]) to ceil((i + 1) * H / windows[0]), and columns likewise.
struct FoldParts {
  TensorView x;              // [N, C, H, W]
  const int32_t* block_map;  // [N, grid.count[0], grid.count[1]] active iff not negative
  BlockGrid grid;            // tiling grid of the plane
  int32_t windows[2];
  int32_t band_rows, bands;  // of a block
  int32_t slices;

  SBNET_HOST_DEVICE int64_t all_windows() const { return x.size[0] * windows[0] * windows[1]; }
  SBNET_HOST_DEVICE int64_t count() const { return all_windows() * slices; }
};

// Pixels that a part has at least, where the blocks have them. A CTA of a GPU has so many under way at once; a thread
// of a CPU needs more of them, and fewer parts to merge.
constexpr int64_t kCudaPartPixels = 128, kCpuPartPixels = 1024;

// Deals the bands of a window out to slices. More pixels a part never make more slices.
inline void deal(FoldParts* p, int64_t part_pixels) {
  constexpr int64_t kMostSlices = 256;
  int64_t blocks = 1;
  for (int d = 0; d < 2; ++d) {
    const int64_t plane = p->x.size[2 + d], windows = p->windows[d];
    const int64_t ends = windows > 1;  // a window may begin and end within blocks and between pixels
    blocks *= ((plane + windows - 1) / windows + ends + p->grid.size[d] - 1) / p->grid.size[d] + ends;
  }
  const int64_t height = p->x.size[2] < p->grid.size[0] ? p->x.size[2] : p->grid.size[0];
  const int64_t width = p->x.size[3] < p->grid.size[1] ? p->x.size[3] : p->grid.size[1];
  const int64_t rows = part_pixels > width ? part_pixels / width : 1;
  p->band_rows = static_cast<int32_t>(rows < height ? rows : height);
  p->bands = static_cast<int32_t>((height + p->band_rows - 1) / p->band_rows);
  const int64_t pixels = p->band_rows * width;
  const int64_t together = pixels < part_pixels ? part_pixels / pixels : 1;  // bands that a slice has at least
  const int64_t slices = (blocks * p->bands + together - 1) / together;
  p->slices = static_cast<int32_t>(slices < kMostSlices ? slices : kMostSlices);
}

// The parts of a GPU: larger ones, up to eight times, where a part's channels alone are work for many CTAs.
template <class Params>
FoldParts cuda_parts(const Params& p) {
  constexpr int64_t kBusy = 1 << 16;  // channels of all parts: a thousand CTAs, of 64 each
  int64_t pixels = kCudaPartPixels;
  FoldParts parts = parts_of(p, pixels);
  while (parts.count() * p.x.size[1] > kBusy && pixels < 8 * kCudaPartPixels) parts = parts_of(p, pixels *= 2);
  return parts;
}

// How a GPU cuts a pixel's channels: into words of `lanes` channels, of which a CTA takes 1 << log2_words.
struct FoldWords {
  int32_t lanes, words, log2_words, chunks;  // words of a pixel; CTAs that share a part, each with its words
  bool channels_inner;  // neighbouring threads take the words of a pixel, else the pixels of a word

  FoldWords(const TensorView& x, bool whole, int most_log2_words) : channels_inner(x.stride[1] <= x.stride[3]) {
    lanes = whole ? static_cast<int32_t>(16 / dtype_size(x.dtype)) : 1;
    words = static_cast<int32_t>(x.size[1] / lanes);
    // 128 bytes of a pixel, or a warp of pixels where those are neighbours; fewer words where a quarter would go
    // unused.
    log2_words = channels_inner && !whole ? most_log2_words : 3;
    while (log2_words) {
      const int32_t taken = ((words - 1) >> log2_words) + 1;
      if (3 * (int64_t{taken} << log2_words) <= 4 * int64_t{words}) break;
      --log2_words;
    }
    chunks = ((words - 1) >> log2_words) + 1;
  }
};

// CTAs of a GPU that may take an image together, each a share of its pixels (cuda/masked/image_fold.cuh), and what they
// tell one another: `values` [N, kImageRanks, C], then `counts` [N, kImageRanks].
constexpr int kImageRanks = 8;
inline int64_t image_fold_bytes(const TensorView& x) {
  const int64_t floats = size_product({x.size[0], kImageRanks, x.size[1] + 1});
  return floats <= INT64_MAX / 4 ? floats * 4 : INT64_MAX;
}

// Numbers that a table lies behind, in whole words of 16 bytes.
SBNET_HOST_DEVICE constexpr int64_t in_quads(int64_t floats) { return (floats + 3) / 4 * 4; }

// What parts found: `values` [parts, fold_values, C], then `counts` [parts] of pixels.
inline int64_t fold_bytes(const FoldParts& p, FoldKind kind) {
  const int64_t floats = size_product({p.all_windows(), p.slices, fold_values(kind) * p.x.size[1] + 1});
  return floats <= INT64_MAX / 4 ? floats * 4 : INT64_MAX;
}
inline float* fold_counts(const FoldParts& p, FoldKind kind, void* workspace) {
  return static_cast<float*>(workspace) + p.count() * fold_values(kind) * p.x.size[1];
}

// Goes through the bands of a part's active blocks, as far as they lie in its window.
class BandWalk {
 public:
  SBNET_HOST_DEVICE BandWalk(const FoldParts& p, int64_t part) : p_(p) {
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
    all_ = int64_t{blocks_[0]} * blocks_[1] * p.bands;
  }
  SBNET_HOST_DEVICE int64_t image() const { return image_; }
  SBNET_HOST_DEVICE int64_t pixels() const { return int64_t{end_[0] - begin_[0]} * (end_[1] - begin_[1]); }

  // Bands from here on, of active blocks or not.
  SBNET_HOST_DEVICE int64_t left() const { return at_ < all_ ? (all_ - at_ + p_.slices - 1) / p_.slices : 0; }
  SBNET_HOST_DEVICE void skip(int64_t bands) { at_ += bands * p_.slices; }
  // The pixels of the band that comes so many bands on, fewer than are left; false if it has none or is of an inactive
  // block.
  SBNET_HOST_DEVICE bool peek(int64_t ahead, PixelRect* rect) const {
    const BlockGrid& grid = p_.grid;
    const int64_t at = at_ + ahead * p_.slices, block = at / p_.bands;
    const int32_t i = first_[0] + static_cast<int32_t>(block / blocks_[1]);
    const int32_t j = first_[1] + static_cast<int32_t>(block % blocks_[1]);
    const int64_t row = int64_t{i} * grid.size[0], column = int64_t{j} * grid.size[1];
    const int64_t row_in_block = (at - block * p_.bands) * p_.band_rows, row_end = row_in_block + p_.band_rows;
    *rect = {inside(0, row + row_in_block), inside(0, row + (row_end < grid.size[0] ? row_end : grid.size[0])),
             inside(1, column), inside(1, column + grid.size[1])};
    return rect->row < rect->row_end && p_.block_map[(image_ * grid.count[0] + i) * grid.count[1] + j] >= 0;
  }
  // The next band's pixels; false after the last.
  SBNET_HOST_DEVICE bool next(PixelRect* rect) {
    while (at_ < all_) {
      const bool found = peek(0, rect);
      skip(1);
      if (found) return true;
    }
    return false;
  }

 private:
  // A row or column, moved into the window.
  SBNET_HOST_DEVICE int32_t inside(int d, int64_t at) const {
    return static_cast<int32_t>(at < begin_[d] ? begin_[d] : at > end_[d] ? end_[d] : at);
  }

  const FoldParts& p_;
  int64_t image_, at_, all_;
  int32_t begin_[2], end_[2], first_[2], blocks_[2];
};

}  // namespace sbnet
