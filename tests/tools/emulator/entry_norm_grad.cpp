// What test_norm_grad_emulated.py calls.
#include <cstdio>
#include <vector>

#include "core/masked/norm_grad.h"
#include "cuda/common.cuh"
#include "machine.h"

namespace {
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

EMULATED emulate_norm_grad(void* dy, const int64_t* dy_sizes, void* x, const int64_t* x_sizes, void* dx,
                           const int64_t* dx_sizes, int32_t dtype, const void* weight, float* params,
                           const int32_t* indices, const int32_t* count, const int32_t* block_map, int64_t capacity,
                           const int32_t* v, const int32_t* pixels, const int32_t* pixel_count, int64_t fringe,
                           int32_t kind, int32_t groups, float eps, char* message, int64_t room) {
  using namespace sbnet;
  NormGradParams p = {};
  p.kind = static_cast<NormKind>(kind), p.groups = groups, p.eps = eps;
  p.grad = view_of(dy, dy_sizes, dtype), p.x = view_of(x, x_sizes, dtype), p.y = view_of(dx, dx_sizes, dtype);
  p.active = {indices, count, block_map, capacity, {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}}};
  p.fringe = {pixels, pixel_count, fringe};
  p.weight = weight, p.param_dtype = DType::kF32, p.grad_params = params;
  // NaN: what is not written shows.
  std::vector<uint32_t> workspace(sbnet_sparse_norm2d_backward_workspace_bytes(&p) / 4 + 4, 0x7fc00000);
  const Status status = sbnet_sparse_norm2d_backward_cuda(&p, workspace.data(), nullptr);
  std::snprintf(message, room, "%s", status.message);
  return !status.ok();
}
}
