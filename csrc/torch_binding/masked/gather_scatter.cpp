#include "core/masked/gather_scatter.h"

#include "core/grid.h"
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Grid = std::vector<int64_t>;

void run(const Call& call, const BlockCopyParams& p) { check(SBNET_KERNELS(block_copy)(call, &p)); }

Tensor sparse_gather(Tensor x, Tensor indices, Tensor count, Tensor block_map, Grid grid, bool transpose,
                     bool zero_tail) {
  const char* op = "sparse_gather";
  const Call call(op, "x", x);
  BlockCopyParams p = {};
  p.plane = view4(op, "x", x);
  p.active = to_active(call, indices, count, &block_map, grid, x.size(0));
  check(check_active(op, p.active));
  SBNET_TORCH_EXPECT(
      x.numel() == 0 || x.size(1) <= INT32_MAX / (int64_t{p.active.grid.size[0]} * p.active.grid.size[1]), op, "grid",
      "blocks of at most 2^31 elements, got ", x.size(1), " channels x ", grid[0], " x ", grid[1], " pixels");
  const bool channels_last = is_channels_last(x) != transpose;
  const int64_t rows = p.active.capacity, C = x.size(1), bh = p.active.grid.size[0], bw = p.active.grid.size[1];
  const Tensor blocks = empty4(x, {rows, C, bh, bw}, channels_last);
  p.blocks = {address_of(blocks.data_ptr()), {rows, C, bh, bw}, {C * bh * bw, bh * bw, bw, 1}, p.plane.dtype};
  if (channels_last) p.blocks.stride[1] = 1, p.blocks.stride[2] = bw * C, p.blocks.stride[3] = C;
  p.direction = CopyDirection::kGather;
  p.zero_tail = zero_tail;
  run(call, p);
  return blocks;
}

bool is_packed(const TensorView& v) {
  const int64_t C = v.size[1], H = v.size[2], W = v.size[3];
  const bool nchw = v.stride[3] == 1 && v.stride[2] == W && v.stride[1] == H * W;
  const bool nhwc = v.stride[1] == 1 && v.stride[3] == C && v.stride[2] == W * C;
  return v.stride[0] == C * H * W && (nchw || nhwc);
}

// `transpose` matters to ONNX, whose shapes are explicit. Here the layouts of blocks and base are read off their
// strides.
void scatter_into(const char* op, Tensor blocks, const Tensor& indices, const Tensor& count, const Tensor& block_map,
                  const Tensor& base, const Grid& grid, bool add, bool atomic) {
  const Call call(op, "base", base);
  call.same_device("blocks", blocks);
  BlockCopyParams p = {};
  p.plane = view4(op, "base", base);
  p.blocks = view4(op, "blocks", blocks);
  if (!is_packed(p.blocks)) {
    blocks = torch::stable::contiguous(blocks);
    p.blocks = view4(op, "blocks", blocks);
  }
  p.active = to_active(call, indices, count, &block_map, grid, base.size(0));
  p.direction = CopyDirection::kScatter;
  p.add = add;
  p.atomic = atomic;
  run(call, p);
}

void sparse_scatter_(Tensor blocks, Tensor indices, Tensor count, Tensor block_map, Tensor base, Grid grid, bool add,
                     bool atomic, bool /*transpose*/) {
  scatter_into("sparse_scatter_", blocks, indices, count, block_map, base, grid, add, atomic);
}

Tensor sparse_scatter(Tensor blocks, Tensor indices, Tensor count, Tensor block_map, Tensor base, Grid grid, bool add,
                      bool atomic, bool /*transpose*/) {
  Tensor y = torch::stable::clone(base);
  scatter_into("sparse_scatter", blocks, indices, count, block_map, y, grid, add, atomic);
  return y;
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_gather(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, bool transpose, bool "
      "zero_tail) -> Tensor",
      TORCH_BOX(&sparse_gather));
  ops.add(
      "sparse_scatter(Tensor blocks, Tensor indices, Tensor count, Tensor block_map, Tensor base, SymInt[] grid, bool "
      "add, bool atomic, bool transpose) -> Tensor",
      TORCH_BOX(&sparse_scatter));
  ops.add(
      "sparse_scatter_(Tensor blocks, Tensor indices, Tensor count, Tensor block_map, Tensor(a!) base, SymInt[] grid, "
      "bool add, bool atomic, bool transpose) -> ()",
      TORCH_BOX(&sparse_scatter_));
}

}  // namespace
}  // namespace sbnet::binding
