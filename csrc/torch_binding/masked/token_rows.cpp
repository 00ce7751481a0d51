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

Tensor empty_rows(const Tensor& x, int64_t images, int64_t rows, int64_t channels) {
  const int64_t sizes[3] = {images, rows, channels};
  return torch::stable::new_empty(x, {sizes, 3});
}

// clear: the rest of out, whose every row is written then, too.
void move_rows(const char* op, const Tensor& x, const MaybeTensor& table, const MaybeTensor& index,
               const MaybeTensor& lengths, const MaybeTensor& mask, int64_t start, bool keep, bool clear,
               const Tensor& out) {
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
  p.start = start, p.keep = keep, p.clear = clear;
  check(op, SBNET_KERNELS(move_rows)(call, &p));
}

void move_rows_(Tensor x, MaybeTensor table, MaybeTensor index, MaybeTensor lengths, MaybeTensor mask, int64_t start,
                bool keep, Tensor out) {
  move_rows("move_rows_", x, table, index, lengths, mask, start, keep, false, out);
}

Tensor new_rows(Tensor x, MaybeTensor table, MaybeTensor index, MaybeTensor lengths, MaybeTensor mask, int64_t start,
                int64_t rows) {
  const char* op = "move_rows";
  check_rank(op, "x", x, 3);
  SBNET_TORCH_EXPECT(rows >= 0, op, "rows", "at least 0, got ", rows);
  const MaybeTensor& by = index ? index : mask ? mask : lengths;
  SBNET_TORCH_EXPECT(!by || by->dim() >= 1, op, "index, mask, lengths", "a number an image, got a scalar");
  const Tensor out = empty_rows(x, by ? by->size(0) : x.size(0), rows, x.size(2));
  move_rows(op, x, table, index, lengths, mask, start, false, true, out);
  return out;
}

void pack_patches(const char* op, const Tensor& x, const Tensor& index, const Tensor& lengths, const Ints& patch,
                  bool clear, const Tensor& out) {
  const Call call(op, "x", x);
  PackPatchesParams p = {};
  p.x = view4(op, "x", x);
  to_pair(op, "patch", patch, p.patch);
  p.out = rows_of(call, "out", out, x, size_product({x.size(1), p.patch[0], p.patch[1]}));
  p.index = index_of(call, index, p.out);
  p.lengths = call.int32("lengths", lengths, p.out.images);
  p.clear = clear;
  check(op, SBNET_KERNELS(pack_patches)(call, &p));
}

void pack_patches_(Tensor x, Tensor index, Tensor lengths, Ints patch, Tensor out) {
  pack_patches("pack_patches_", x, index, lengths, patch, false, out);
}

Tensor new_patches(Tensor x, Tensor index, Tensor lengths, Ints patch) {
  const char* op = "pack_patches";
  check_rank(op, "x", x, 4), check_rank(op, "index", index, 2);
  int32_t sides[2];
  to_pair(op, "patch", patch, sides);
  SBNET_TORCH_EXPECT(sides[0] >= 1 && sides[1] >= 1, op, "patch", "at least 1 x 1");
  const Tensor out = empty_rows(x, index.size(0), index.size(1), size_product({x.size(1), sides[0], sides[1]}));
  pack_patches(op, x, index, lengths, patch, true, out);
  return out;
}

MergePixelsParams merge_params(const Call& call, const Tensor& x, const Tensor& block_map, const Ints& grid,
                               int64_t factor, const Ints& offsets) {
  const char* op = call.op();
  MergePixelsParams p = {};
  p.x = view4(op, "x", x);
  p.grid = to_grid(op, grid);
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, x.size(0)));
  p.factor = to_int32(op, "factor", factor);
  SBNET_TORCH_EXPECT(offsets.size() % 2 == 0 && offsets.size() <= 2 * kMostOffsets, op, "offsets", "pairs, at most ",
                     kMostOffsets, ", got ", offsets.size(), " numbers");
  p.count = static_cast<int32_t>(offsets.size() / 2);
  for (size_t i = 0; i < offsets.size(); ++i) p.offsets[i / 2][i % 2] = to_int32(op, "offsets", offsets[i]);
  return p;
}

void merge_pixels_(Tensor x, Tensor block_map, Ints grid, int64_t factor, Ints offsets, Tensor out) {
  const char* op = "merge_pixels_";
  const Call call(op, "x", x);
  call.same_device("out", out);
  MergePixelsParams p = merge_params(call, x, block_map, grid, factor, offsets);
  p.out = view4(op, "out", out);
  check(op, SBNET_KERNELS(merge_pixels)(call, &p));
}

Tensor new_merged(Tensor x, Tensor block_map, Ints grid, int64_t factor, Ints offsets) {
  const char* op = "merge_pixels";
  const Call call(op, "x", x);
  MergePixelsParams p = merge_params(call, x, block_map, grid, factor, offsets);
  SBNET_TORCH_EXPECT(factor >= 1, op, "factor", "at least 1, got ", factor);
  const Tensor out = zeros4(x, {x.size(0), x.size(1) * p.count, x.size(2) / factor, x.size(3) / factor}, true);
  p.out = view4(op, "out", out);
  check(op, SBNET_KERNELS(merge_pixels)(call, &p));
  return out;
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
      "move_rows(Tensor x, Tensor? table, Tensor? index, Tensor? lengths, Tensor? mask, SymInt start, SymInt rows) -> "
      "Tensor",
      TORCH_BOX(&new_rows));
  ops.add("pack_patches(Tensor x, Tensor index, Tensor lengths, SymInt[] patch) -> Tensor", TORCH_BOX(&new_patches));
  ops.add("merge_pixels(Tensor x, Tensor block_map, SymInt[] grid, SymInt factor, SymInt[] offsets) -> Tensor",
          TORCH_BOX(&new_merged));
  ops.add(
      "merge_pixels_(Tensor x, Tensor block_map, SymInt[] grid, SymInt factor, SymInt[] offsets, Tensor(a!) out) -> ()",
      TORCH_BOX(&merge_pixels_));
}

}  // namespace
}  // namespace sbnet::binding
