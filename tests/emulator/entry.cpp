// What test_emulator.py calls, and the few functions of the CUDA runtime that launches want.
#include <cstdio>

#include "cuda/common.cuh"
#include "cuda/sm90/conv1x1.h"
#include "cuda/sm90/conv1x1_split.h"
#include "cuda/sm90/conv1x1_wide.h"
#include "cuda/sm90/conv3x3.h"
#include "cuda/sm90/conv_stem.h"
#include "machine.h"

extern "C" {

cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNotSupported; }
cudaError_t cudaGetDevice(int*) { return cudaErrorNotSupported; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulator::failure.c_str() : "refused by the emulator";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(emulator::encode);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Channel-last tensors, packed: x [n, h, w, c], weight [k, r, r, c], bias [k], residual (or null) and y [n, ho, wo, k].
// `kernel`: of those below. Returns 0, or 1 if the kernel does not take it, or 2 and what went wrong.
struct Conv {
  int32_t kernel, multiprocessors, seed, bfloat16;
  int32_t n, h, w, c, k, r, stride, ho, wo, block_h, block_w, activation;
  void *x, *weight, *bias, *residual, *y;
  const int32_t *indices, *count, *fringe, *fringe_count;
  int64_t capacity, fringe_capacity;
};

__attribute__((visibility("default"))) int emulate_conv(const Conv* conv, char* message, int64_t room) {
  using namespace sbnet;
  const Conv& v = *conv;
  const DType dtype = v.bfloat16 ? DType::kBF16 : DType::kF16;
  auto view = [&](void* data, int64_t n, int64_t c, int64_t h, int64_t w) {
    return TensorView{data, {n, c, h, w}, {h * w * c, 1, w * c, c}, dtype};
  };
  Conv2dParams p = {};
  p.x = view(v.x, v.n, v.c, v.h, v.w), p.weight = view(v.weight, v.k, v.c, v.r, v.r);
  p.bias = v.bias, p.bias_dtype = dtype, p.y = view(v.y, v.n, v.k, v.ho, v.wo);
  if (v.residual) p.residual = view(v.residual, v.n, v.k, v.ho, v.wo);
  p.active = {v.indices, v.count, nullptr, v.capacity, {{v.block_h, v.block_w}, {v.block_h, v.block_w}, {0, 0}, {}}};
  p.active.grid.count[0] = (v.ho + v.block_h - 1) / v.block_h;
  p.active.grid.count[1] = (v.wo + v.block_w - 1) / v.block_w;
  p.fringe = {v.fringe, v.fringe_count, v.fringe_capacity};
  p.groups = 1, p.activation = static_cast<Activation>(v.activation), p.activation_param = 0.01f;
  for (int d = 0; d < 2; ++d) p.stride[d] = v.stride, p.padding[d] = v.r / 2, p.dilation[d] = 1;

  const DeviceInfo device = {v.multiprocessors, v.multiprocessors, 90};  // launches remember what they asked a device
  emulator::multiprocessors = v.multiprocessors;
  emulator::random.seed(v.seed);
  Status status = ok_status();
  if (v.kernel == 0 && sm90::conv1x1_takes(p))
    status = sm90::conv1x1(p, device, nullptr);
  else if (v.kernel == 1 && sm90::conv1x1_takes(p))
    status = sm90::conv1x1_wide(p, device, nullptr);
  else if (v.kernel == 2 && sm90::conv1x1_takes(p) && sm90::conv1x1_split_takes(p))
    status = sm90::conv1x1_split(p, device, nullptr);
  else if (v.kernel == 3 && sm90::conv3x3_takes(p))
    status = sm90::conv3x3(p, device, nullptr);
  else if (v.kernel == 4 && sm90::conv_stem_takes(p))
    status = sm90::conv_stem(p, device, nullptr);
  else
    return 1;
  if (status.ok()) return 0;
  std::snprintf(message, room, "%s", status.message);
  return 2;
}
}
