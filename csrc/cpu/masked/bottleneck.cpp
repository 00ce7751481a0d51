// sparse_bottleneck2d on the CPU: its three convolutions, one after the other, with h1 and h2 in the workspace.
#include "core/masked/bottleneck.h"

#include <algorithm>
#include <cstring>

namespace sbnet {
namespace {

// The 3x3 convolution reads a pixel around each active block. Those of h1 in inactive blocks are never written:
// they are cleared, each by the thread that has its block, and no more of a plane that may be large.
void clear_around_blocks(const TensorView& h1, const ActiveView& active, const Parallel& parallel) {
  const BlockGrid& grid = active.grid;
  const int64_t rows = grid.count[0], columns = grid.count[1], pixel = h1.stride[3] * dtype_size(h1.dtype);
  parallel_for(parallel, h1.size[0] * rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = r / rows, i = r % rows;
      const auto is_active = [&](int64_t row, int64_t column) {
        if (row < 0 || row >= rows || column < 0 || column >= columns) return false;
        const int32_t slot = active.block_map[(n * rows + row) * columns + column];
        return slot >= 0 && slot < *active.count;  // rows past the count are not computed
      };
      for (int64_t j = 0; j < columns; ++j) {
        if (is_active(i, j)) continue;
        for (int64_t near = 0; near < 9; ++near) {
          const int64_t down = near / 3 - 1, right = near % 3 - 1;
          if (!is_active(i + down, j + right)) continue;
          // What of this block lies next to that one: a side or a corner.
          const int64_t top = i * grid.size[0], bottom = std::min(top + grid.size[0], h1.size[2]);
          const int64_t left = j * grid.size[1], edge = std::min(left + grid.size[1], h1.size[3]);
          const int64_t first = right > 0 ? edge - 1 : left, last = right < 0 ? left + 1 : edge;
          for (int64_t y = down > 0 ? bottom - 1 : top; y < (down < 0 ? top + 1 : bottom); ++y) {
            char* row = static_cast<char*>(h1.data) + (n * h1.size[2] + y) * h1.size[3] * pixel;
            std::memset(row + first * pixel, 0, static_cast<size_t>((last - first) * pixel));
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace sbnet

int64_t sbnet_sparse_bottleneck2d_workspace_bytes_cpu(const sbnet::BottleneckParams* p, int32_t threads) {
  if (!sbnet::validate(*p).ok()) return 0;
  sbnet::Conv2dParams layers[3];
  sbnet::bottleneck_layers(*p, nullptr, layers);
  int64_t scratch = 0;
  for (const sbnet::Conv2dParams& layer : layers)
    scratch = std::max(scratch, sbnet_sparse_conv2d_workspace_bytes_cpu(&layer, threads));
  return 2 * sbnet::bottleneck_plane_bytes(*p) + scratch;
}

sbnet::Status sbnet_sparse_bottleneck2d_cpu(const sbnet::BottleneckParams* p, void* workspace,
                                            const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  sbnet::Conv2dParams layers[3];
  sbnet::bottleneck_layers(*p, workspace, layers);
  const int64_t plane = sbnet::bottleneck_plane_bytes(*p);
  char* scratch = static_cast<char*>(workspace) + 2 * plane;
  sbnet::clear_around_blocks(layers[0].y, p->active, *parallel);
  for (int k = 0; k < 3; ++k)
    SBNET_TRY(sbnet::status_of_layer(sbnet_sparse_conv2d_cpu(&layers[k], scratch, parallel), k));
  return sbnet::ok_status();
}
