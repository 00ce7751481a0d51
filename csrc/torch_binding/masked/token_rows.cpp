#include "core/masked/token_rows.h"

#include <tuple>

#include "core/grid.h"
#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using MaybeTensor = std::optional<Tensor>;

// [images, rows, channels] of x's dtype.
Rows rows_of(const Call& call, const char* name, const Tensor& t, const Tensor& x, int64_t channels) {
  call.same_device(name, t);
  check_rank(call.op(), name, t, 3);
  SBNET_TORCH_EXPECT(t.scalar_type() == x.scalar_type(), call.op(), name, "the dtype of x, got another");
  SBNET_TORCH_EXPECT(t.size(2) == channels && (channels <= 1 || t.stride(2) == 1), call.op(), name, channels,
                     " channels beside each other, got ", t.size(2));
  return {address_of(t.data_ptr()), t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

const int64_t* index_of(const Call& call, const Tensor& t, const Rows& out) {
  call.same_device("index", t);
  SBNET_TORCH_EXPECT(
      t.scalar_type() == ScalarType::Long && t.is_contiguous() && t.numel() == size_product({out.images, out.rows}),
      call.op(), "index", "a contiguous int64 tensor of ", out.images, " x ", out.rows, ", got ", t.numel(),
      " elements");
  return static_cast<const int64_t*>(address_of(t.const_data_ptr()));
}

// lengths, order, rows, mask, filled: see PackTokensParams.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_tokens(Tensor block_map, Ints grid, Ints size, int64_t prefix,
                                                               int64_t suffix, int64_t capacity) {
  const char* op = "pack_tokens";
  const Call call(op, "block_map", block_map);
  check_rank(op, "block_map", block_map, 3);
  PackTokensParams p = {};
  p.batch = block_map.size(0);
  p.grid = to_grid(op, grid);
  int32_t sides[2];
  to_pair(op, "size", size, sides);
  p.height = sides[0], p.width = sides[1];
  p.prefix = to_int32(op, "prefix", prefix), p.suffix = to_int32(op, "suffix", suffix);
  p.capacity = to_int32(op, "capacity", capacity);
  check(validate(p));
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, p.batch));
  const int64_t held[2] = {p.batch, p.capacity}, each[2] = {p.batch, p.tokens()};
  const auto made = [&](const int64_t (&sizes)[2], ScalarType type) {
    return torch::stable::new_empty(block_map, {sizes, 2}, type);
  };
  const Tensor lengths = empty_int32(block_map, {p.batch}), order = made(held, ScalarType::Long);
  const Tensor rows = made(each, ScalarType::Long), mask = made(each, ScalarType::Bool);
  const Tensor filled = made(held, ScalarType::Bool);
  p.lengths = static_cast<int32_t*>(lengths.data_ptr());
  p.order = static_cast<int64_t*>(order.data_ptr()), p.rows = static_cast<int64_t*>(rows.data_ptr());
  p.mask = static_cast<uint8_t*>(mask.data_ptr()), p.filled = static_cast<uint8_t*>(filled.data_ptr());
  check(SBNET_KERNELS(pack_tokens)(call, &p));
  return {lengths, order, rows, mask, filled};
}

void move_rows_(Tensor x, MaybeTensor table, MaybeTensor index, MaybeTensor lengths, MaybeTensor mask, int64_t start,
                bool keep, Tensor out) {
  const char* op = "move_rows_";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 3);
  MoveRowsParams p = {};
  p.channels = x.size(2);
  p.x = rows_of(call, "x", x, x, p.channels), p.out = rows_of(call, "out", out, x, p.channels);
  if (table) p.table = rows_of(call, "table", *table, x, p.channels);
  p.element_bytes = static_cast<int32_t>(dtype_size(to_dtype(op, "x", x)));
  if (index) p.index = index_of(call, *index, p.out);
  if (lengths) p.lengths = call.int32("lengths", *lengths, p.out.images);
  if (mask) {
    call.same_device("mask", *mask);
    SBNET_TORCH_EXPECT(mask->scalar_type() == ScalarType::Bool && mask->is_contiguous() &&
                           mask->numel() == size_product({p.out.images, p.out.rows}),
                       op, "mask", "a contiguous bool tensor of ", p.out.images, " x ", p.out.rows, ", got ",
                       mask->numel(), " elements");
    p.mask = static_cast<const uint8_t*>(address_of(mask->const_data_ptr()));
  }
  p.start = start, p.keep = keep;
  check(op, SBNET_KERNELS(move_rows)(call, &p));
}

void pack_patches_(Tensor x, Tensor index, Tensor lengths, Ints patch, Tensor out) {
  const char* op = "pack_patches_";
  const Call call(op, "x", x);
  PackPatchesParams p = {};
  p.x = view4(op, "x", x);
  to_pair(op, "patch", patch, p.patch);
  p.out = rows_of(call, "out", out, x, size_product({x.size(1), p.patch[0], p.patch[1]}));
  p.index = index_of(call, index, p.out);
  p.lengths = call.int32("lengths", lengths, p.out.images);
  check(op, SBNET_KERNELS(pack_patches)(call, &p));
}

void merge_pixels_(Tensor x, Tensor block_map, Ints grid, int64_t factor, Ints offsets, Tensor out) {
  const char* op = "merge_pixels_";
  const Call call(op, "x", x);
  call.same_device("out", out);
  MergePixelsParams p = {};
  p.x = view4(op, "x", x), p.out = view4(op, "out", out);
  p.grid = to_grid(op, grid);
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, x.size(0)));
  p.factor = to_int32(op, "factor", factor);
  SBNET_TORCH_EXPECT(offsets.size() % 2 == 0 && offsets.size() <= 2 * kMostOffsets, op, "offsets", "pairs, at most ",
                     kMostOffsets, ", got ", offsets.size(), " numbers");
  p.count = static_cast<int32_t>(offsets.size() / 2);
  for (size_t i = 0; i < offsets.size(); ++i) p.offsets[i / 2][i % 2] = to_int32(op, "offsets", offsets[i]);
  check(op, SBNET_KERNELS(merge_pixels)(call, &p));
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "pack_tokens(Tensor block_map, SymInt[] grid, SymInt[] size, SymInt prefix, SymInt suffix, SymInt capacity) -> "
      "(Tensor lengths, Tensor order, Tensor rows, Tensor mask, Tensor filled)",
      TORCH_BOX(&pack_tokens));
  ops.add(
      "move_rows_(Tensor x, Tensor? table, Tensor? index, Tensor? lengths, Tensor? mask, SymInt start, bool keep, "
      "Tensor(a!) out) -> ()",
      TORCH_BOX(&move_rows_));
  ops.add("pack_patches_(Tensor x, Tensor index, Tensor lengths, SymInt[] patch, Tensor(a!) out) -> ()",
          TORCH_BOX(&pack_patches_));
  ops.add(
      "merge_pixels_(Tensor x, Tensor block_map, SymInt[] grid, SymInt factor, SymInt[] offsets, Tensor(a!) out) -> ()",
      TORCH_BOX(&merge_pixels_));
}

}  // namespace
}  // namespace sbnet::binding
