// The fringe on the CPU: every thread marks rows of the plane, then one pass lists the marked pixels in order.
#include "cpu/fringe.h"

sbnet::Status sbnet_fringe_cpu(const sbnet::FringeParams* params, void* workspace, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const FringeParams& p = *params;
  SBNET_TRY(validate(p));
  const TiledPlane mine(p.height, p.width, p.producer.grid.size);
  const TiledPlane theirs(p.out_height, p.out_width, p.consumer.grid.size);
  const Reader reader(p.window);
  const int64_t rows = p.batch * p.height, words_per_row = mine.words();
  uint32_t* words = static_cast<uint32_t*>(workspace);
  parallel_for(*parallel, rows, 1 + 4096 / p.width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = r / p.height;
      const int y = static_cast<int>(r % p.height);
      const MapLookup written = {p.producer.block_map + n * mine.count[0] * mine.count[1], mine.count[1]};
      const MapLookup read = {p.consumer.block_map + n * theirs.count[0] * theirs.count[1], theirs.count[1]};
      for (int w = 0; w < words_per_row; ++w)
        words[r * words_per_row + w] = read_by(theirs, reader, read, y, w * 32, unwritten(mine, written, y, w * 32));
    }
  });
  list_pixels(words, rows, p.width, p.capacity, p.pixels, p.count);
  return ok_status();
}
