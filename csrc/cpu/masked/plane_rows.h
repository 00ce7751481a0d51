// How the CPU writes a whole plane of which the active blocks alone hold anything: threads take rows, body(row)
// computes the columns of blocks that are active, all others become zeros.
#pragma once
#include <algorithm>
#include <cstring>

#include "core/types.h"
#include "cpu/masked/block_row.h"

namespace sbnet {

// `work`: roughly the arithmetic of a pixel. kZeros: else what is not active stays as it is.
template <bool kZeros = true, class Body>
void write_plane(const TensorView& y, const ActiveView& active, int64_t work, const Parallel& parallel,
                 const Body& body) {
  const BlockGrid& grid = active.grid;
  const int64_t C = y.size[1], H = y.size[2], W = y.size[3], size = dtype_size(y.dtype);
  const bool packed = y.stride[1] == 1 && y.stride[3] == C;
  const auto zero = [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    char* to = static_cast<char*>(y.data) + (n * y.stride[0] + row * y.stride[2] + begin * y.stride[3]) * size;
    if (packed) {
      std::memset(to, 0, static_cast<size_t>((end - begin) * C * size));
    } else if (y.stride[1] == 1) {
      for (int64_t w = begin; w < end; ++w, to += y.stride[3] * size) std::memset(to, 0, static_cast<size_t>(C * size));
    } else {
      for (int64_t c = 0; c < C; ++c, to += y.stride[1] * size)
        if (y.stride[3] == 1)
          std::memset(to, 0, static_cast<size_t>((end - begin) * size));
        else
          for (int64_t w = begin; w < end; ++w)
            std::memset(to + (w - begin) * y.stride[3] * size, 0, static_cast<size_t>(size));
    }
  };
  parallel_for(parallel, y.size[0] * H, 1 + 65536 / (W * work), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = r / H, row = r % H;
      const int32_t* map = active.block_map + (n * grid.count[0] + row / grid.size[0]) * grid.count[1];
      for (int64_t j = 0; j < grid.count[1];) {
        const bool taken = map[j] >= 0;
        const int64_t first = j * grid.size[1];
        while (j < grid.count[1] && (map[j] >= 0) == taken) ++j;
        const int64_t last = std::min<int64_t>(j * grid.size[1], W);
        if (taken)
          body(BlockRow{n, row, first, last});
        else if (kZeros)
          zero(n, row, first, last);
      }
    }
  });
}

}  // namespace sbnet
