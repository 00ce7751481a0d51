// What test_matmul_emulated.py calls.
#include <cstdio>

#include "core/weights/plan.h"
#include "cuda/common.cuh"
#include "cuda/sm90/matmul/launch.cuh"
#include "cuda/sm90/matmul/matmul.h"
#include "cuda/weights/matmul_portable.cuh"
#include "machine.h"

extern "C" {

// Rows of adjacent features, `stride` elements apart: x [rows, C], y [rows, K]; weight [blocks, size, size]; coords
// [blocks, 2]. With `indices`, the pixels of active blocks: rows is images * height * width. kernel: 0 wide or (with
// indices) quad, 1 narrow, 2 weight gradient (x and y are the inputs, weight the result), 3 the wide one of sm_80.
struct MatmulCase {
  int32_t kernel, multiprocessors, seed, bfloat16;
  int32_t rows, c, k, block_size, blocks, transposed, activation, cluster;
  int32_t images, height, width, block_h, block_w, capacity;
  int64_t x_stride, y_stride;
  void *x, *y, *weight, *bias;
  const int32_t *coords, *indices, *count;
};

__attribute__((visibility("default"))) int emulate_matmul(const MatmulCase* given, char* message, int64_t room) {
  using namespace sbnet;
  const MatmulCase& v = *given;
  const int64_t size = v.block_size;
  const BlockLayoutShape shape = {(v.c + size - 1) / size, (v.k + size - 1) / size, v.blocks, v.c, v.k, v.block_size};
  std::vector<int32_t> words(block_layout_words(shape));
  Status status = make_block_layout(shape, v.coords, words.data());
  const BlockLayoutView layout = block_layout_view(shape, words.data());
  const MatmulPass pass = v.kernel == 2  ? MatmulPass::kWeightGradient
                          : v.transposed ? MatmulPass::kInputGradient
                                         : MatmulPass::kForward;
  std::vector<int4> plan(blocksparse_plan_words(layout, pass) / 4 + 1);
  const int64_t plan_words = blocksparse_plan_words(layout, pass);
  make_blocksparse_plan(layout, pass, reinterpret_cast<int32_t*>(plan.data()));
  emulator::multiprocessors = v.multiprocessors;
  emulator::random.seed(v.seed);
  const DeviceInfo device = {v.multiprocessors, v.multiprocessors, 90};
  const DType dtype = v.bfloat16 ? DType::kBF16 : DType::kF16;
  auto matrix = [&](void* data, int64_t features, int64_t stride) {
    if (v.indices)
      return TensorView{data,
                        {v.images, features, v.height, v.width},
                        {stride * v.height * v.width, 1, stride * v.width, stride},
                        dtype};
    return TensorView{data, {1, features, 1, v.rows}, {0, 1, 0, stride}, dtype};
  };
  bool takes;
  if (v.kernel == 2) {
    BlocksparseWeightGradParams p = {};
    p.pairs = 1, p.x[0] = matrix(v.x, v.c, v.x_stride), p.dy[0] = matrix(v.y, v.k, v.y_stride);
    p.dw = v.weight, p.dw_dtype = dtype, p.layout = layout;
    p.plan = reinterpret_cast<int32_t*>(plan.data()), p.plan_words = plan_words;
    takes = sm90::blocksparse_weight_grad_takes(p);
    if (takes && status.ok()) status = sm90::blocksparse_weight_grad(p, device, nullptr, nullptr);
  } else {
    BlocksparseMatmulParams p = {};
    p.x = matrix(v.x, v.transposed ? v.k : v.c, v.x_stride), p.y = matrix(v.y, v.transposed ? v.c : v.k, v.y_stride);
    p.weight = v.weight, p.bias = v.bias, p.bias_dtype = dtype, p.layout = layout;
    p.plan = reinterpret_cast<int32_t*>(plan.data()), p.plan_words = plan_words, p.transposed = v.transposed;
    p.activation = static_cast<Activation>(v.activation), p.activation_param = 0.01f;
    if (v.indices) {
      const BlockGrid grid = {{v.block_h, v.block_w},
                              {v.block_h, v.block_w},
                              {0, 0},
                              {(v.height + v.block_h - 1) / v.block_h, (v.width + v.block_w - 1) / v.block_w}};
      p.active = {v.indices, v.count, nullptr, v.capacity, grid};
    }
    takes = v.kernel == 3 || sm90::blocksparse_matmul_takes(p);
    if (v.kernel == 3 && status.ok())
      status = portable::launch_matmul_wide({p, p.start(), p.start() + 1, p.entries()}, device, nullptr);
    else if (takes && status.ok())
      status = v.kernel == 1 ? sm90::matmul::launch_narrow(p, device, nullptr)
               : v.indices   ? sm90::matmul::launch_quad(p, device, nullptr)
                             : sm90::matmul::launch_wide(p, device, nullptr);
  }
  std::snprintf(message, room, "%s", status.message);
  return !status.ok() ? 2 : takes ? 0 : 1;
}
}
