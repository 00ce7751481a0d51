#include "core/masked/bottleneck.h"

#include <cstring>

#include "core/grid.h"
#include "core/layer.h"

namespace sbnet {
namespace {
constexpr const char* kOp = "sparse_bottleneck2d";
}  // namespace

int64_t bottleneck_plane_bytes(const BottleneckParams& p) {
  const int64_t elements = p.x.size[0] * p.weight[0].size[0] * p.x.size[2] * p.x.size[3];
  return (elements * dtype_size(p.x.dtype) + 255) / 256 * 256;
}

void bottleneck_layers(const BottleneckParams& p, void* workspace, Conv2dParams (&layers)[3]) {
  const int64_t N = p.x.size[0], width = p.weight[0].size[0], H = p.x.size[2], W = p.x.size[3];
  TensorView hidden[2];
  for (int k = 0; k < 2; ++k) {
    // An integer, as it may count from null: for validate() the two planes must be apart.
    const uintptr_t data =
        reinterpret_cast<uintptr_t>(workspace) + static_cast<uintptr_t>(k * bottleneck_plane_bytes(p));
    hidden[k] = {reinterpret_cast<void*>(data), {N, width, H, W}, {H * W * width, 1, W * width, width}, p.x.dtype};
  }
  const TensorView* planes[4] = {&p.x, &hidden[0], &hidden[1], &p.y};
  for (int k = 0; k < 3; ++k) {
    Conv2dParams& layer = layers[k] = {};
    layer.x = *planes[k];
    layer.weight = p.weight[k];
    layer.bias = p.bias[k];
    layer.bias_dtype = p.bias_dtype;
    layer.y = *planes[k + 1];
    layer.active = p.active;
    for (int d = 0; d < 2; ++d) layer.stride[d] = layer.dilation[d] = 1, layer.padding[d] = k == 1;
    layer.groups = 1;
    layer.activation = p.activation;
    layer.activation_param = p.activation_param;
    layer.allow_tf32 = p.allow_tf32;
    layer.packed = p.packed[k];
  }
  layers[2].residual = p.x;
  layers[2].fringe = p.fringe;
}

Status status_of_layer(const Status& status, int layer) {
  if (status.ok()) return status;
  const char* colon = std::strchr(status.message, ':');
  const char* text = colon && colon[1] ? colon + 2 : status.message;
  const int rest = static_cast<int>(sizeof(status.message)) - 64;
  if (!std::strncmp(text, "weight:", 7))
    return make_status(status.code, "%s: weight%d%.*s", kOp, layer + 1, rest, text + 6);
  if (!std::strncmp(text, "bias:", 5))
    return make_status(status.code, "%s: bias%d%.*s", kOp, layer + 1, rest, text + 4);
  return make_status(status.code, "%s: %.*s", kOp, rest, text);
}

Status validate(const BottleneckParams& p) {
  SBNET_TRY(check_input(kOp, p.x));
  SBNET_TRY(check_plane(kOp, "out", p.y));
  const int64_t C = p.x.size[1], width = p.weight[0].size[0];
  const int64_t shapes[3][4] = {{width, C, 1, 1}, {width, width, 3, 3}, {C, width, 1, 1}};
  double bytes = 1;
  for (int k = 0; k < 3; ++k) {
    const int64_t *size = p.weight[k].size, *want = shapes[k];
    for (int d = 0; d < 4; ++d)
      SBNET_CHECK(size[d] == want[d], "%s: weight%d: shape: expected [%lld,%lld,%lld,%lld], got [%lld,%lld,%lld,%lld]",
                  kOp, k + 1, static_cast<long long>(want[0]), static_cast<long long>(want[1]),
                  static_cast<long long>(want[2]), static_cast<long long>(want[3]), static_cast<long long>(size[0]),
                  static_cast<long long>(size[1]), static_cast<long long>(size[2]), static_cast<long long>(size[3]));
  }
  for (int d = 0; d < 4; ++d) bytes *= static_cast<double>(d == 1 ? width : p.x.size[d]);
  SBNET_CHECK(bytes < 0x1p46, "%s: x, weights: expected fewer than 2^46 elements between two layers, got %.0f", kOp,
              bytes);

  SBNET_TRY(check_active(kOp, p.active));
  SBNET_CHECK(p.active.block_map || !p.x.size[0], "%s: active: expected a block map, got none", kOp);
  Conv2dParams layers[3];
  bottleneck_layers(p, nullptr, layers);
  for (int k = 0; k < 3; ++k) {
    layers[k].active.capacity = 0;  // which memory is shared is told below
    layers[k].residual.data = nullptr;
    SBNET_TRY(status_of_layer(validate(layers[k]), k));
  }
  SBNET_CHECK(!may_overlap(p.x, p.y), "%s: out: expected memory of its own, got that of x", kOp);
  for (int k = 0; k < 3; ++k)
    SBNET_CHECK(!may_overlap(p.weight[k], p.y), "%s: out: expected memory of its own, got that of weight%d", kOp,
                k + 1);
  return ok_status();
}

}  // namespace sbnet
