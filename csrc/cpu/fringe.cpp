// The fringe on the CPU: every thread marks rows of the plane, then one pass lists the marked pixels in order.
#include "core/fringe.h"

#include <cstring>

namespace sbnet {
namespace {

// Consumer blocks along dimension d whose outputs can read coordinates [first, last]: a range that holds them all.
struct BlockRange {
  int64_t begin, end;
};
BlockRange possible_readers(const FringeParams& p, int d, int64_t first, int64_t last) {
  const int64_t reach = static_cast<int64_t>(p.kernel[d] - 1) * p.dilation[d];
  const int64_t size = static_cast<int64_t>(p.stride[d]) * p.consumer.grid.size[d];
  const int64_t low = first + p.padding[d] - reach, high = (last + p.padding[d]) / size + 1;
  return {low > 0 ? low / size : 0, high < p.consumer.grid.count[d] ? high : p.consumer.grid.count[d]};
}

// marks[x] = is (n, y, x) in the fringe? Most blocks are settled as a whole: active, or far from any active reader.
void mark_row(const FringeParams& p, const FringeTest& in_fringe, int n, int y, uint8_t* marks) {
  const BlockGrid &mine = p.producer.grid, &theirs = p.consumer.grid;
  const int32_t* own =
      p.producer.block_map + (static_cast<int64_t>(n) * mine.count[0] + y / mine.size[0]) * mine.count[1];
  const int32_t* map = p.consumer.block_map + static_cast<int64_t>(n) * theirs.count[0] * theirs.count[1];
  const BlockRange rows = possible_readers(p, 0, y, y);
  std::memset(marks, 0, static_cast<size_t>(p.width));
  for (int64_t b = 0; b < mine.count[1]; ++b) {
    if (own[b] >= 0) continue;
    const int64_t x0 = b * mine.size[1], x1 = x0 + mine.size[1] < p.width ? x0 + mine.size[1] : p.width;
    const BlockRange columns = possible_readers(p, 1, x0, x1 - 1);
    bool near = false;
    for (int64_t i = rows.begin; i < rows.end && !near; ++i)
      for (int64_t j = columns.begin; j < columns.end && !near; ++j) near = map[i * theirs.count[1] + j] >= 0;
    if (!near) continue;
    for (int64_t x = x0; x < x1; ++x) marks[x] = in_fringe(n, y, static_cast<int>(x));
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_fringe_cpu(const sbnet::FringeParams* params, void* workspace, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const FringeParams& p = *params;
  SBNET_TRY(validate(p));
  const FringeTest in_fringe(p);
  const int64_t rows = p.batch * p.height;
  uint8_t* marks = static_cast<uint8_t*>(workspace);
  parallel_for(*parallel, rows, 1 + 4096 / p.width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      mark_row(p, in_fringe, static_cast<int>(r / p.height), static_cast<int>(r % p.height), marks + r * p.width);
  });
  int64_t count = 0;
  const int64_t pixels = rows * p.width;
  for (int64_t k = 0; k < pixels && count < p.capacity; ++k) {
    if (k + 8 <= pixels) {  // eight unmarked pixels at once
      uint64_t word;
      std::memcpy(&word, marks + k, 8);
      if (!word) {
        k += 7;
        continue;
      }
    }
    if (marks[k]) p.pixels[count++] = static_cast<int32_t>(k);
  }
  *p.count = static_cast<int32_t>(count);
  for (int64_t k = count; k < p.capacity; ++k) p.pixels[k] = -1;
  return ok_status();
}
