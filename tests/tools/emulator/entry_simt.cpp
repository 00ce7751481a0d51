// What test_simt_emulated.py calls: ops whose kernels run on every GPU.
#include <cstdio>

#include "core/attention/layout.h"
#include "core/frames/yuv_to_rgb.h"
#include "core/lists/fringe.h"
#include "core/lists/motion_mask.h"
#include "core/lists/pyramid.h"
#include "core/lists/reduce_mask.h"
#include "core/masked/adaptive_pool.h"
#include "core/masked/copies.h"
#include "core/masked/fill.h"
#include "core/masked/norm.h"
#include "core/masked/pool.h"
#include "core/masked/rearrange.h"
#include "core/masked/squeeze_excite.h"
#include "cuda/common.cuh"
#include "machine.h"

namespace sbnet {
// The kernels that go through shared memory are not emulated: the plain ones take every pool.
bool pool_tiles_takes(const PoolParams&) { return false; }
Status launch_pool_tiles(const PoolParams&, const DeviceInfo&, cudaStream_t) { return ok_status(); }
}  // namespace sbnet

namespace {
sbnet::BlockGrid grid_of(const int32_t* v) {  // bsize, bstride, boffset, bcount
  return {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}};
}
sbnet::TensorView view_of(void* data, const int64_t* v, int32_t dtype) {  // sizes, strides
  return {data, {v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}, static_cast<sbnet::DType>(dtype)};
}
int told(const sbnet::Status& status, char* message, int64_t room) {
  std::snprintf(message, room, "%s", status.message);
  return !status.ok();
}
}  // namespace

extern "C" {
#define EMULATED __attribute__((visibility("default"))) int

EMULATED emulate_seed(int32_t seed) {
  emulator::multiprocessors = 3;
  emulator::random.seed(seed);
  return 0;
}

EMULATED emulate_pack_attention_blocks(const uint8_t* blocks, uint32_t* rows, uint32_t* columns, int64_t planes,
                                       int32_t q_blocks, int32_t k_blocks, char* message, int64_t room) {
  const sbnet::PackAttentionBlocksParams p = {blocks, rows, columns, planes, q_blocks, k_blocks};
  return told(sbnet_pack_attention_blocks_cuda(&p, nullptr), message, room);
}

EMULATED emulate_reduce_mask(const void* mask, int32_t dtype, const int64_t* sizes, const int32_t* grid, double tol,
                             int32_t avgpool, int64_t capacity, int32_t* indices, int32_t* count, int32_t* total,
                             int32_t* block_map, char* message, int64_t room) {
  using namespace sbnet;
  ReduceMaskParams p = {};
  p.mask = mask, p.mask_dtype = static_cast<DType>(dtype), p.grid = grid_of(grid), p.tol = tol;
  for (int d = 0; d < 3; ++d) p.size[d] = sizes[d], p.stride[d] = sizes[3 + d];
  p.avgpool = avgpool, p.capacity = capacity;
  p.indices = indices, p.count = count, p.total = total, p.block_map = block_map;
  std::vector<uint4> workspace(p.size[0] * p.grid.count[0] * p.grid.count[1] / 16 + 2);
  return told(sbnet_reduce_mask_cuda(&p, workspace.data(), nullptr), message, room);
}

EMULATED emulate_fringe(const int32_t* producer, const int32_t* consumer, const int64_t* sizes, const int32_t* own,
                        const int32_t* theirs, const int32_t* window, int64_t capacity, int32_t* pixels, int32_t* count,
                        char* message, int64_t room) {
  using namespace sbnet;
  FringeParams p = {};
  const int32_t none = 0;
  p.producer = {nullptr, &none, producer, 0, grid_of(own)};
  p.consumer = {nullptr, &none, consumer, 0, grid_of(theirs)};
  p.batch = sizes[0], p.height = sizes[1], p.width = sizes[2], p.out_height = sizes[3], p.out_width = sizes[4];
  for (int d = 0; d < 2; ++d) {
    p.window.num[d] = window[d], p.window.den[d] = window[2 + d], p.window.lo[d] = window[4 + d];
    p.window.hi[d] = window[6 + d], p.window.step[d] = window[8 + d];
  }
  p.capacity = capacity, p.pixels = pixels, p.count = count;
  const int64_t words = p.batch * p.height * ((p.width + 31) / 32);
  std::vector<int32_t> workspace(words + words / 32 + 1);
  return told(sbnet_fringe_cuda(&p, workspace.data(), nullptr), message, room);
}

// numbers: threshold, rate, cut; `next` may be the background.
EMULATED emulate_motion_mask(void* frame, const int64_t* sizes, int32_t dtype, const float* background, float* next,
                             uint8_t* mask, const float* numbers, int64_t smooth, char* message, int64_t room) {
  using namespace sbnet;
  MotionMaskParams p = {
      view_of(frame, sizes, dtype), background, next, mask, numbers[0], numbers[1], numbers[2], smooth};
  std::vector<uint4> workspace(sbnet_motion_mask_workspace_bytes(&p) / 16 + 1);
  return told(sbnet_motion_mask_cuda(&p, workspace.data(), nullptr), message, room);
}

// look: as of the op's schema.
EMULATED emulate_yuv_to_rgb(const uint8_t* planes, const int64_t* size, const int32_t* look, void* rgb,
                            const int64_t* sizes, int32_t dtype, char* message, int64_t room) {
  using namespace sbnet;
  YuvToRgbParams p = {planes,  size[0],      size[1] / 3 * 2, size[2],      view_of(rgb, sizes, dtype),
                      look[0], look[1],      look[2],         look[3],      look[4],
                      look[5], look[6] != 0, look[7] != 0,    look[8] != 0, look[9] != 0};
  return told(sbnet_yuv_to_rgb_cuda(&p, nullptr), message, room);
}

// out: indices, count, total and block map of each plane, then pixels and count of each fringe.
EMULATED emulate_pyramid(const void* mask, int32_t dtype, const int64_t* sizes, double tol, int64_t margin,
                         const int64_t* planes, int64_t plane_numbers, const int64_t* fringes, int64_t fringe_numbers,
                         const int64_t* out, char* message, int64_t room) {
  using namespace sbnet;
  PyramidTables tables;
  const Status read = tables.read({planes, plane_numbers, fringes, fringe_numbers});
  if (!read.ok()) return told(read, message, room);
  PyramidParams& p = tables.params;
  p.mask = mask, p.mask_dtype = static_cast<DType>(dtype), p.tol = tol, p.margin = margin;
  for (int d = 0; d < 3; ++d) p.size[d] = sizes[d], p.stride[d] = sizes[3 + d];
  const auto next = [&] { return reinterpret_cast<int32_t*>(*out++); };
  for (int k = 0; k < p.planes; ++k) {
    PyramidPlane& to = p.plane[k];
    to.indices = next(), to.count = next(), to.total = next(), to.block_map = next();
  }
  for (int k = 0; k < p.fringes; ++k) p.fringe[k].pixels = next(), p.fringe[k].count = next();
  std::vector<uint4> workspace(sbnet_mask_pyramid_workspace_bytes(&p) / 16 + 1);
  return told(sbnet_mask_pyramid_cuda(&p, workspace.data(), nullptr), message, room);
}

EMULATED emulate_copies(const void* from, void* to, const int64_t* spans, int32_t count, char* message, int64_t room) {
  sbnet::CopiesParams p = {};
  for (int k = 0; k < count; ++k) {  // where it begins in `from`, where in `to`, bytes; -1: the address in their place
    p.from[k] = static_cast<const char*>(from) + spans[3 * k];
    p.to[k] = static_cast<char*>(to) + spans[3 * k + 1];
    p.address[k] = spans[3 * k + 2] < 0;
    p.bytes[k] = p.address[k] ? static_cast<int64_t>(sizeof(void*)) : spans[3 * k + 2];
  }
  p.count = count;
  return told(sbnet_copies_cuda(&p, nullptr), message, room);
}

EMULATED emulate_fill(void* x, const int64_t* x_sizes, void* y, const int64_t* y_sizes, int32_t dtype,
                      const int32_t* block_map, const int32_t* grid, float value, char* message, int64_t room) {
  using namespace sbnet;
  const FillParams p = {view_of(x, x_sizes, dtype), view_of(y, y_sizes, dtype), block_map, grid_of(grid), value};
  return told(sbnet_sparse_fill_cuda(&p, nullptr), message, room);
}

EMULATED emulate_pool(void* x, const int64_t* x_sizes, void* y, const int64_t* y_sizes, int32_t dtype,
                      const int32_t* indices, const int32_t* count, int64_t capacity, const int32_t* grid,
                      const int32_t* pixels, const int32_t* pixel_count, int64_t fringe, const int32_t* options,
                      char* message, int64_t room) {
  using namespace sbnet;
  PoolParams p = {};
  p.kind = static_cast<PoolKind>(options[0]);
  p.x = view_of(x, x_sizes, dtype), p.y = view_of(y, y_sizes, dtype);
  p.active = {indices, count, nullptr, capacity, grid_of(grid)};
  p.fringe = {pixels, pixel_count, fringe};
  for (int d = 0; d < 2; ++d) {
    p.kernel[d] = options[1 + d], p.stride[d] = options[3 + d], p.padding[d] = options[5 + d];
    p.dilation[d] = options[7 + d];
  }
  p.ceil_mode = options[9], p.count_include_pad = options[10];
  return told(sbnet_sparse_pool2d_cuda(&p, nullptr), message, room);
}

EMULATED emulate_adaptive_pool(void* x, const int64_t* x_sizes, void* y, const int64_t* y_sizes, int32_t dtype,
                               const int32_t* block_map, const int32_t* grid, int32_t kind, int32_t count_inactive,
                               char* message, int64_t room) {
  using namespace sbnet;
  const AdaptivePoolParams p = {static_cast<AdaptivePoolKind>(kind),
                                view_of(x, x_sizes, dtype),
                                view_of(y, y_sizes, dtype),
                                block_map,
                                grid_of(grid),
                                count_inactive != 0};
  std::vector<uint4> workspace(sbnet_sparse_adaptive_pool2d_workspace_bytes(&p) / 16 + 1);
  return told(sbnet_sparse_adaptive_pool2d_cuda(&p, workspace.data(), nullptr), message, room);
}

EMULATED emulate_squeeze_excite(void* x, const int64_t* x_sizes, void* y, const int64_t* y_sizes, int32_t dtype,
                                const void* weight1, const void* bias1, const void* weight2, const void* bias2,
                                int64_t hidden, const int32_t* block_map, const int32_t* grid, void* scaled,
                                const int64_t* scaled_sizes, char* message, int64_t room) {
  using namespace sbnet;
  SqueezeExciteParams p = {};
  p.x = view_of(x, x_sizes, dtype), p.y = view_of(y, y_sizes, dtype);
  if (scaled) p.scaled = view_of(scaled, scaled_sizes, dtype);
  p.weight1 = weight1, p.weight2 = weight2, p.bias1 = bias1, p.bias2 = bias2, p.bias_dtype = p.x.dtype;
  p.hidden = hidden, p.activation = StepCode::kSilu, p.gate = StepCode::kHardsigmoid;
  p.block_map = block_map, p.grid = grid_of(grid);
  std::vector<uint4> workspace(sbnet_sparse_squeeze_excite2d_workspace_bytes(&p) / 16 + 1);
  return told(sbnet_sparse_squeeze_excite2d_cuda(&p, workspace.data(), nullptr), message, room);
}

EMULATED emulate_norm(void* x, const int64_t* x_sizes, void* y, const int64_t* y_sizes, int32_t dtype,
                      const void* weight, const void* bias, const int32_t* indices, const int32_t* count,
                      const int32_t* block_map, int64_t capacity, const int32_t* grid, const int32_t* pixels,
                      const int32_t* pixel_count, int64_t fringe, int32_t kind, int32_t groups, float eps,
                      char* message, int64_t room) {
  using namespace sbnet;
  NormParams p = {};
  p.kind = static_cast<NormKind>(kind), p.groups = groups, p.eps = eps;
  p.x = view_of(x, x_sizes, dtype), p.y = view_of(y, y_sizes, dtype);
  p.active = {indices, count, block_map, capacity, grid_of(grid)};
  p.fringe = {pixels, pixel_count, fringe};
  p.weight = weight, p.bias = bias, p.param_dtype = p.x.dtype;
  std::vector<uint4> workspace(sbnet_sparse_norm2d_workspace_bytes(&p) / 16 + 1);
  return told(sbnet_sparse_norm2d_cuda(&p, workspace.data(), nullptr), message, room);
}

EMULATED emulate_rearrange(void* x, const int64_t* x_sizes, void* y, const int64_t* y_sizes, int32_t dtype,
                           const int32_t* indices, const int32_t* count, int64_t capacity, const int32_t* grid,
                           const int32_t* pixels, const int32_t* pixel_count, int64_t fringe, const int32_t* numbers,
                           float value, char* message, int64_t room) {
  using namespace sbnet;
  RearrangeParams p = {};
  p.x = view_of(x, x_sizes, dtype), p.y = view_of(y, y_sizes, dtype);
  p.active = {indices, count, nullptr, capacity, grid_of(grid)};
  p.fringe = {pixels, pixel_count, fringe};
  p.up = numbers[0], p.down = numbers[1], p.groups = numbers[2], p.value = value;
  for (int k = 0; k < 4; ++k) p.pad[k] = numbers[3 + k];
  return told(sbnet_sparse_rearrange_cuda(&p, nullptr), message, room);
}
}
