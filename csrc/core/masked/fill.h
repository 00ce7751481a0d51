// sparse_fill: where(active, x, value). What a tensor holds outside the active blocks of the layer that wrote it is not
// defined; this defines it, before something that is not block-sparse reads the tensor.
#pragma once
#include "core/kernels.h"

namespace sbnet {

struct FillParams {
  TensorView x;              // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView y;              // shape and dtype of x; x itself (in place: only the filled pixels are written), or apart
  const int32_t* block_map;  // [N, grid.count[0], grid.count[1]] active iff not negative
  BlockGrid grid;            // tiling grid of the plane
  float value;               // rounded to the dtype
  bool in_place() const { return x.data == y.data; }
};

SBNET_EXPORT Status validate(const FillParams& p);

}  // namespace sbnet

SBNET_DECLARE(sparse_fill, FillParams)
extern "C" {
// Device to device, on the stream.
SBNET_EXPORT sbnet::Status sbnet_copy_cuda(void* to, const void* from, int64_t bytes, void* stream);
}
