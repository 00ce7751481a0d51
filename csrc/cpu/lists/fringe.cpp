// The fringe on the CPU: every thread marks rows of the plane, then one pass lists the marked pixels in order. And its
// use: layers set the listed pixels to zero.
#include "cpu/lists/fringe.h"

#include <algorithm>

namespace sbnet {
namespace {

template <class T>
void zero_pixels(const TensorView& y, const int32_t* pixels, int64_t begin, int64_t end) {
  const int64_t K = y.size[1], H = y.size[2], W = y.size[3];
  for (int64_t f = begin; f < end; ++f) {
    const int64_t pixel = pixels[f];
    if (pixel < 0 || pixel >= y.size[0] * H * W) continue;
    T* at =
        static_cast<T*>(y.data) + pixel / (H * W) * y.stride[0] + pixel / W % H * y.stride[2] + pixel % W * y.stride[3];
    if (y.stride[1] == 1)
      std::fill_n(at, K, T{0});
    else
      for (int64_t k = 0; k < K; ++k) at[k * y.stride[1]] = T{0};
  }
}

}  // namespace

void zero_fringe(const TensorView& y, const FringeView& fringe, const Parallel& parallel) {
  if (!fringe.pixels) return;
  const int64_t count = std::clamp<int64_t>(*fringe.count, 0, fringe.capacity);
  parallel_for(parallel, count, 512, [&](int64_t begin, int64_t end) {
    if (dtype_size(y.dtype) == 4)
      zero_pixels<uint32_t>(y, fringe.pixels, begin, end);
    else if (dtype_size(y.dtype) == 2)
      zero_pixels<uint16_t>(y, fringe.pixels, begin, end);
    else
      zero_pixels<uint8_t>(y, fringe.pixels, begin, end);
  });
}

}  // namespace sbnet

sbnet::Status sbnet_fringe_cpu(const sbnet::FringeParams* params, void* workspace, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const FringeParams& p = *params;
  SBNET_TRY(validate(p));
  const TiledPlane mine(p.height, p.width, p.producer.grid.size);
  const TiledPlane theirs(p.out_height, p.out_width, p.consumer.grid.size);
  const Reader reader(p.window);
  const int64_t rows = p.batch * p.height, words_per_row = mine.words();
  uint32_t* words = static_cast<uint32_t*>(workspace);
  parallel_for(*parallel, rows, 1 + kFringePixels / p.width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = r / p.height;
      const int y = static_cast<int>(r % p.height);
      if (r > begin && !differs_from_row_above(mine, theirs, reader, y)) {
        std::copy_n(words + (r - 1) * words_per_row, words_per_row, words + r * words_per_row);
        continue;
      }
      const MapLookup written = {p.producer.block_map + n * mine.count[0] * mine.count[1], mine.count[1]};
      const MapLookup read = {p.consumer.block_map + n * theirs.count[0] * theirs.count[1], theirs.count[1]};
      for (int w = 0; w < words_per_row; ++w)
        words[r * words_per_row + w] = read_by(theirs, reader, read, y, w * 32, unwritten(mine, written, y, w * 32));
    }
  });
  list_pixels(words, rows, p.width, p.capacity, p.kept, p.pixels, p.count);
  return ok_status();
}
