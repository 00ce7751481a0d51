// A bottleneck block in one op: 1x1 convolution to few channels, 3x3, 1x1 back, and the shortcut, on the active blocks.
//   h1 = activation(conv(x, weight[0]) + bias[0]) on active blocks, 0 elsewhere
//   h2 = activation(conv(h1, weight[1], padding 1) + bias[1])
//   y = activation(conv(h2, weight[2]) + bias[2] + x)
// as three calls of sparse_conv2d with a fringe, which it is where no kernel does all at once.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

struct BottleneckParams {
  TensorView x;          // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView weight[3];  // [width, C, 1, 1], [width, width, 3, 3], [C, width, 1, 1] of x.dtype, any strides
  const void* bias[3];   // [width], [width], [C] contiguous; each may be null
  DType bias_dtype;      // x.dtype or float32, of all
  TensorView y;          // [N, C, H, W] of x.dtype, any strides; must not overlap x or a weight
  ActiveView active;     // tiling grid of the plane, with block_map: where h1 is 0 is the map's to say
  FringeView fringe;     // of y
  Activation activation;
  float activation_param;
  bool allow_tf32;
  const void* packed[3];  // of each weight null, or what pack_conv_weight made of it
};

// Its three layers; h1 and h2 lie at the beginning of `workspace`, channel-last. h1 must hold zeros around the
// active blocks when the second layer runs. Without a workspace (null) the layers serve to be validated.
void bottleneck_layers(const BottleneckParams& p, void* workspace, Conv2dParams (&layers)[3]);
// Bytes of h1, those of h2, a multiple of 256.
int64_t bottleneck_plane_bytes(const BottleneckParams& p);
// What a layer (0, 1, 2) returned, as this op's status.
Status status_of_layer(const Status& status, int layer);
SBNET_EXPORT Status validate(const BottleneckParams& p);

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(sparse_bottleneck2d, BottleneckParams)
