// What test_batch_norm_emulated.py calls.
#include <cstdio>
#include <limits>

#include "core/masked/batch_norm.h"
#include "cuda/common.cuh"
#include "machine.h"

// Tensors of [n, c, h, w] with these strides; residual, given and grad_residual may be null.
struct Case {
  int32_t multiprocessors, seed, type, n, c, h, w, block, activation;
  int64_t stride[4];
  void *x, *y, *residual, *grad, *given, *dx, *grad_residual;
  float *weight, *bias, *statistics, *mean, *variance, *grad_params;
  const int32_t *indices, *count, *block_map, *fringe, *fringe_count;
  int64_t capacity, fringe_capacity;

  sbnet::TensorView view(void* data) const {
    sbnet::TensorView t = {data, {n, c, h, w}, {stride[0], stride[1], stride[2], stride[3]}};
    t.dtype = static_cast<sbnet::DType>(type);
    return t;
  }
  template <class Params>
  Params params(void* in, void* out) const {
    emulator::multiprocessors = multiprocessors;
    emulator::random.seed(seed);
    Params p = {};
    p.x = view(in), p.y = view(out);
    p.active = {indices, count, block_map, capacity,
                {{block, block}, {block, block}, {0, 0}, {(h + block - 1) / block, (w + block - 1) / block}}};
    p.fringe = {fringe, fringe_count, fringe_capacity};
    p.weight = weight, p.bias = bias, p.param_dtype = sbnet::DType::kF32, p.statistics = statistics, p.eps = 1e-5f;
    p.activation = static_cast<sbnet::Activation>(activation), p.activation_param = 0.1f;
    return p;
  }
};

template <class Params>
int run(sbnet::Status (*kernel)(const Params*, void*, void*), const Params& p, int64_t bytes, char* message,
        int64_t room) {
  std::vector<float> workspace(bytes / 4 + 1, std::numeric_limits<float>::quiet_NaN());
  const sbnet::Status status = kernel(&p, workspace.data(), nullptr);
  std::snprintf(message, room, "%s", status.message);
  return status.ok() ? 0 : 2;
}

extern "C" {

__attribute__((visibility("default"))) int emulate_norm(const Case* v, char* message, int64_t room) {
  auto p = v->params<sbnet::BatchNormParams>(v->x, v->y);
  if (v->residual) p.residual = v->view(v->residual);
  p.follow = {v->statistics, v->mean, v->variance, v->c, 0.1f};
  return run(sbnet_sparse_batch_norm2d_cuda, p, sbnet::norm_bytes(p.x), message, room);
}
__attribute__((visibility("default"))) int emulate_norm_grad(const Case* v, char* message, int64_t room) {
  auto p = v->params<sbnet::BatchNormGradParams>(v->x, v->dx);
  p.grad = v->view(v->grad), p.grad_params = v->grad_params;
  if (v->given) p.given = v->view(v->given);
  if (v->grad_residual) p.grad_residual = v->view(v->grad_residual);
  return run(sbnet_sparse_batch_norm2d_backward_cuda, p, sbnet::norm_bytes(p.x), message, room);
}
}
