// What test_resize_grad_emulated.py calls.
#include <cstdio>

#include "core/masked/resize_grad.h"
#include "cuda/common.cuh"
#include "machine.h"

namespace {
sbnet::BlockGrid grid_of(const int32_t* v) { return {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}}; }
sbnet::TensorView view_of(void* data, const int64_t* v, int32_t dtype) {  // sizes, strides
  return {data, {v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}, static_cast<sbnet::DType>(dtype)};
}
}  // namespace

extern "C" {
#define EMULATED __attribute__((visibility("default"))) int

EMULATED emulate_seed(int32_t seed) {
  emulator::multiprocessors = 3;
  emulator::random.seed(seed);
  return 0;
}

// indices: null where all of dx is written.
EMULATED emulate_resize_grad(void* dy, const int64_t* dy_sizes, void* dx, const int64_t* dx_sizes, int32_t dtype,
                             const int32_t* block_map, const int32_t* grid, int32_t mode, int32_t align_corners,
                             float ratio_h, float ratio_w, const int32_t* indices, const int32_t* count,
                             int64_t capacity, const int32_t* x_grid, const int32_t* pixels,
                             const int32_t* pixel_count, int64_t fringe, char* message, int64_t room) {
  using namespace sbnet;
  ResizeGradParams p = {};
  p.x = view_of(dy, dy_sizes, dtype), p.y = view_of(dx, dx_sizes, dtype);
  p.read_map = block_map, p.read_grid = grid_of(grid);
  p.mode = static_cast<ResizeMode>(mode), p.align_corners = align_corners;
  p.ratio[0] = ratio_h, p.ratio[1] = ratio_w;
  if (indices) {
    p.active = {indices, count, nullptr, capacity, grid_of(x_grid)};
    p.fringe = {pixels, pixel_count, fringe};
  }
  const Status status = sbnet_sparse_resize2d_grad_cuda(&p, nullptr);
  std::snprintf(message, room, "%s", status.message);
  return !status.ok();
}
}
