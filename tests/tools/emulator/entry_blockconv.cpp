// What test_blockconv_emulated.py and test_blockconv_hopper_emulated.py call: convolutions with block-sparse weights as
// every GPU computes them, and as Hopper does.
#include <cstdio>

#include "core/weights/conv.h"
#include "cuda/common.cuh"
#include "cuda/sm90/conv/conv.h"
#include "machine.h"

namespace {

sbnet::VolumeView volume(void* data, const int64_t* v, int32_t dtype) {  // sizes, strides
  return {data, {v[0], v[1], v[2], v[3], v[4]}, {v[5], v[6], v[7], v[8], v[9]}, static_cast<sbnet::DType>(dtype)};
}

}  // namespace

struct Case {
  int32_t seed, dtype, weight_grad, transposed, activation, capacity, block_h, block_w, rows, columns, hopper;
  int32_t geometry[12];
  int64_t x_shape[10], y_shape[10];
  void *x, *y, *weight;  // of the weight gradient: y is dy, weight is dw
  const void* bias;
  const int32_t *tables, *indices, *count;
};

extern "C" __attribute__((visibility("default"))) int emulate_blockconv(const Case* c, char* message, int64_t room) {
  using namespace sbnet;
  emulator::multiprocessors = 3;
  emulator::random.seed(c->seed);
  int64_t numbers[kConvLayoutNumbers];
  for (int i = 0; i < kConvLayoutNumbers; ++i) numbers[i] = c->tables[i];
  const BlocksparseConvLayout layout = conv_layout_view(conv_layout_shape(numbers), c->tables);
  ConvGeometry geometry;
  for (int d = 0; d < 3; ++d) {
    geometry.kernel[d] = c->geometry[d], geometry.stride[d] = c->geometry[3 + d];
    geometry.padding[d] = c->geometry[6 + d], geometry.dilation[d] = c->geometry[9 + d];
  }
  const VolumeView x = volume(c->x, c->x_shape, c->dtype), y = volume(c->y, c->y_shape, c->dtype);
  Status status = ok_status();
  if (c->weight_grad) {
    const BlocksparseConvWeightGradParams p = {x, y, c->weight, layout, geometry};
    status = sbnet_blocksparse_conv_weight_grad_cuda(&p, nullptr, nullptr);
  } else {
    BlocksparseConvParams p = {};
    p.x = x, p.y = y, p.weight = c->weight, p.bias = c->bias, p.bias_dtype = x.dtype;
    p.layout = layout, p.geometry = geometry, p.transposed = c->transposed;
    p.activation = static_cast<Activation>(c->activation);
    if (c->indices)
      p.active = {c->indices,
                  c->count,
                  nullptr,
                  c->capacity,
                  {{c->block_h, c->block_w}, {c->block_h, c->block_w}, {0, 0}, {c->rows, c->columns}}};
    if (!c->hopper) {
      status = sbnet_blocksparse_conv_cuda(&p, nullptr, nullptr);
    } else if (const char* why = hopper_blocksparse_conv_declines(p)) {
      status = make_status(Code::kUnsupported, "declined: %s", why);
    } else {
      // NaN, on a line of 256 bytes
      std::vector<uint8_t> scratch(sm90::conv_blocksparse_packed_bytes(layout.shape, p.to()) + 256, 0xff);
      uint8_t* at = scratch.data() + (256 - reinterpret_cast<uintptr_t>(scratch.data()) % 256);
      const DeviceInfo device = {63, c->hopper, 90};
      if (c->seed % 2) {  // packed before
        status = sm90::pack_blocksparse({p.weight, at, x.dtype, layout, p.transposed}, device, nullptr);
        p.packed = at, p.weight = nullptr;
      }
      if (status.ok()) status = sm90::conv_blocksparse(p, device, at, nullptr);
    }
  }
  std::snprintf(message, room, "%s", status.message);
  return !status.ok();
}
