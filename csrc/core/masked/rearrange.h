// What only moves elements, on the active blocks of the OUTPUT plane: pixel_shuffle, pixel_unshuffle, channel shuffle,
// padding and cropping as one map from outputs to inputs.
#pragma once
#include "core/fastdiv.h"
#include "core/layer.h"

namespace sbnet {

// y = pad(channel_shuffle(pixel_unshuffle(pixel_shuffle(x, up), down), groups), pad, value), where a step that changes
// nothing has the number 1, or 0 pixels.
struct RearrangeParams {
  TensorView x;       // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView y;       // [N, C / up^2 * down^2, Ho, Wo] of x.dtype, any strides; must not overlap x
  ActiveView active;  // tiling grid of y's plane: offset 0, stride = size, count = ceil(plane / size)
  FringeView fringe;
  int32_t up, down, groups;
  int32_t pad[4];  // left, right, top, bottom; negative ones crop
  float value;     // of what is padded, rounded to the dtype
};

// Shapes, dtypes, grid against plane. Everything a kernel relies on.
SBNET_EXPORT Status validate(const RearrangeParams& p);

// Where an output comes from.
struct RearrangeMap {
  FastDiv up, down, groups;
  int32_t group;        // channels of a group: those of y, over groups
  int32_t before[2];    // rows and columns of padding in front
  int32_t side[2];      // of the plane between them
  bool keeps_channels;  // y's channels are x's, in order

  RearrangeMap() = default;
  explicit RearrangeMap(const RearrangeParams& p)
      : up(p.up),
        down(p.down),
        groups(p.groups),
        group(static_cast<int32_t>(p.y.size[1] / p.groups)),
        keeps_channels(p.up == 1 && p.down == 1 && (p.groups == 1 || group == 1)) {
    before[0] = p.pad[2], before[1] = p.pad[0];
    for (int d = 0; d < 2; ++d) side[d] = static_cast<int32_t>(p.x.size[2 + d] * p.up / p.down);
  }
  // A row (d = 0) or column of y as one between the paddings; false where it is padding.
  SBNET_HOST_DEVICE bool inside(int d, int* at) const {
    *at -= before[d];
    return *at >= 0 && *at < side[d];
  }
  // Channel k of y, of the plane between the paddings, as a channel of x, and as a row and column of x.
  SBNET_HOST_DEVICE void source(int k, int* channel, int* row, int* column) const {
    uint32_t first, second, rest, c, i, j;
    groups.divmod(static_cast<uint32_t>(k), &second, &first);
    down.divmod(first * static_cast<uint32_t>(group) + second, &rest, &j);
    down.divmod(rest, &c, &i);
    uint32_t h, w, part_h, part_w;
    up.divmod(static_cast<uint32_t>(*row) * down.divisor + i, &h, &part_h);
    up.divmod(static_cast<uint32_t>(*column) * down.divisor + j, &w, &part_w);
    *channel = static_cast<int>((c * up.divisor + part_h) * up.divisor + part_w);
    *row = static_cast<int>(h), *column = static_cast<int>(w);
  }
};

}  // namespace sbnet

SBNET_DECLARE(sparse_rearrange, RearrangeParams)

namespace sbnet {

struct RearrangeLayer : LayerOf<RearrangeParams> {
  static constexpr const char* kName = "sparse_rearrange";
  template <class Read>
  static void numbers(RearrangeParams& p, Read& read) {
    read.integer("up", &p.up, 1);
    read.integer("down", &p.down, 1);
    read.integer("groups", &p.groups, 1);
    read.integers("pad", p.pad, 0);
    read.real("value", &p.value, 0);
  }
  SBNET_EXPORT static Status check(const RearrangeParams& p);
  SBNET_EXPORT static Status size(const RearrangeParams& p, int d, int64_t x, int64_t* y);
  static constexpr auto kernels = SBNET_KERNELS(sparse_rearrange);
};

}  // namespace sbnet
