#include "core/attention/window_attention.h"

#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;
using MaybeTensor = std::optional<Tensor>;

// A contiguous tensor of so many elements; float32 is allowed beside the dtype of q where `floats`.
const void* numbers_of(const Call& call, const char* name, const MaybeTensor& t, DType own, int64_t count, bool floats,
                       DType* dtype = nullptr) {
  if (!t) return nullptr;
  call.same_device(name, *t);
  const DType given = to_dtype(call.op(), name, *t);
  SBNET_TORCH_EXPECT(given == own || (floats && given == DType::kF32), call.op(), std::string(name) + ": dtype",
                     dtype_name(own), floats ? " or float32" : "", ", got ", dtype_name(given));
  SBNET_TORCH_EXPECT(t->is_contiguous() && t->numel() == count, call.op(), name, count, " contiguous numbers, got ",
                     t->numel(), t->is_contiguous() ? "" : " that are not");
  if (dtype) *dtype = given;
  return address_of(t->const_data_ptr());
}

const int64_t* index_of(const Call& call, const char* name, const Tensor& t, int32_t* windows, int32_t* rows) {
  call.same_device(name, t);
  check_rank(call.op(), name, t, 2);
  SBNET_TORCH_EXPECT(t.scalar_type() == ScalarType::Long && t.is_contiguous(), call.op(), name,
                     "a contiguous int64 tensor, got another");
  *windows = to_int32(call.op(), name, t.size(0)), *rows = to_int32(call.op(), name, t.size(1));
  return static_cast<const int64_t*>(address_of(t.const_data_ptr()));
}

int32_t side_of(const char* op, const char* name, const MaybeTensor& t) {
  if (!t) return 0;
  check_rank(op, name, *t, 3);
  SBNET_TORCH_EXPECT(t->size(0) == t->size(1), op, name, "as many keys as queries, got ", t->size(1), " and ",
                     t->size(0));
  return to_int32(op, name, t->size(0));
}

struct Lists {
  MaybeTensor row_order, row_lengths, key_order, key_lengths;
};

WindowAttentionParams::Listed listed_of(const Call& call, const char* name, const MaybeTensor& order,
                                        const MaybeTensor& lengths, int64_t images) {
  SBNET_TORCH_EXPECT(order.has_value() == lengths.has_value(), call.op(), name, "an order and lengths, got one");
  if (!order) return {};
  call.same_device(name, *order);
  check_rank(call.op(), name, *order, 2);
  SBNET_TORCH_EXPECT(order->scalar_type() == ScalarType::Long && order->is_contiguous() && order->size(0) == images,
                     call.op(), name, "a contiguous int64 tensor of ", images, " images, got another");
  return {static_cast<const int64_t*>(address_of(order->const_data_ptr())), call.int32(name, *lengths, images),
          order->size(1)};
}

void run(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rows, const Tensor& keys,
         const Tensor& block_map, const MaybeTensor& active_keys, const MaybeTensor& bias, const MaybeTensor& row_table,
         const MaybeTensor& column_table, const MaybeTensor& scales, const MaybeTensor& k_fill,
         const MaybeTensor& v_fill, const Ints& grid, const Ints& starts, int64_t heads, int64_t dim, int64_t value_dim,
         double scale, double normalize, const Tensor& out, const Lists& lists = {}) {
  const Call call(op, "q", q);
  for (const auto& [name, t] : {std::pair{"k", &k}, {"v", &v}, {"out", &out}}) call.same_device(name, *t);
  WindowAttentionParams p = {};
  p.q = view4(op, "q", q), p.k = view4(op, "k", k), p.v = view4(op, "v", v), p.out = view4(op, "out", out);
  SBNET_TORCH_EXPECT(starts.size() == 3, op, "starts", "3 numbers, got ", starts.size());
  std::copy(starts.begin(), starts.end(), p.starts);
  p.heads = to_int32(op, "heads", heads), p.dim = to_int32(op, "dim", dim);
  p.value_dim = to_int32(op, "value_dim", value_dim);
  int32_t windows = 0;
  p.row_index = index_of(call, "rows", rows, &p.windows, &p.rows);
  p.key_index = index_of(call, "keys", keys, &windows, &p.keys);
  SBNET_TORCH_EXPECT(windows == p.windows, op, "keys", "the ", p.windows, " windows of rows, got ", windows);
  p.grid = to_grid(op, grid);
  check_batch(op, block_map, q);
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, q.size(0)));
  const DType own = p.q.dtype;
  if (active_keys) {
    SBNET_TORCH_EXPECT(active_keys->scalar_type() == ScalarType::Bool, op, "active_keys: dtype", "bool, got another");
    p.active_keys = static_cast<const uint8_t*>(numbers_of(call, "active_keys", active_keys, DType::kBool,
                                                           size_product({k.size(0), k.size(2), k.size(3)}), false));
  }
  if (bias) {
    check_rank(op, "bias", *bias, 4);
    p.bias_windows = bias->size(0);
    SBNET_TORCH_EXPECT(p.bias_windows == 1 || p.bias_windows == p.windows, op, "bias", "one or ", p.windows,
                       " windows, got ", p.bias_windows);
  }
  const int64_t scores = size_product({p.bias_windows, p.heads, p.rows, p.keys});
  p.bias.data = numbers_of(call, "bias", bias, own, scores, true, &p.bias.dtype);
  SBNET_TORCH_EXPECT(row_table.has_value() == column_table.has_value(), op, "row_table, column_table",
                     "both or none, got one");
  p.table_rows = side_of(op, "row_table", row_table), p.table_columns = side_of(op, "column_table", column_table);
  p.row_table = numbers_of(call, "row_table", row_table, own, size_product({p.table_rows, p.table_rows, p.dim}), false);
  p.column_table = numbers_of(call, "column_table", column_table, own,
                              size_product({p.table_columns, p.table_columns, p.dim}), false);
  p.scales.data = numbers_of(call, "scales", scales, own, p.heads, true, &p.scales.dtype);
  p.k_fill = numbers_of(call, "k_fill", k_fill, own, size_product({p.heads, p.dim}), false);
  p.v_fill = numbers_of(call, "v_fill", v_fill, own, size_product({p.heads, p.value_dim}), false);
  p.scale = static_cast<float>(scale), p.normalize = static_cast<float>(normalize);
  p.listed_rows = listed_of(call, "row_order", lists.row_order, lists.row_lengths, q.size(0));
  p.listed_keys = listed_of(call, "key_order", lists.key_order, lists.key_lengths, q.size(0));
  check(validate(p));
  check(SBNET_KERNELS(window_attention)(call, &p));
}

void window_attention_(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, Tensor block_map,
                       MaybeTensor active_keys, MaybeTensor bias, MaybeTensor row_table, MaybeTensor column_table,
                       MaybeTensor scales, MaybeTensor k_fill, MaybeTensor v_fill, MaybeTensor row_order,
                       MaybeTensor row_lengths, MaybeTensor key_order, MaybeTensor key_lengths, Ints grid, Ints starts,
                       int64_t heads, int64_t dim, int64_t value_dim, double scale, double normalize, Tensor out) {
  run("window_attention_", q, k, v, rows, keys, block_map, active_keys, bias, row_table, column_table, scales, k_fill,
      v_fill, grid, starts, heads, dim, value_dim, scale, normalize, out,
      {row_order, row_lengths, key_order, key_lengths});
}

Tensor window_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, Tensor block_map,
                        MaybeTensor active_keys, MaybeTensor bias, MaybeTensor row_table, MaybeTensor column_table,
                        MaybeTensor scales, MaybeTensor k_fill, MaybeTensor v_fill, Ints grid, Ints starts,
                        int64_t heads, int64_t dim, int64_t value_dim, double scale, double normalize) {
  const char* op = "window_attention";
  check_rank(op, "q", q, 4);
  SBNET_TORCH_EXPECT(heads >= 1 && value_dim >= 1 && heads <= INT32_MAX && value_dim <= INT32_MAX, op,
                     "heads, value_dim", "at least 1, got ", heads, " and ", value_dim);
  const Tensor out = zeros4(q, {q.size(0), heads * value_dim, q.size(2), q.size(3)}, true);
  run(op, q, k, v, rows, keys, block_map, active_keys, bias, row_table, column_table, scales, k_fill, v_fill, grid,
      starts, heads, dim, value_dim, scale, normalize, out);
  return out;
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "window_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, Tensor block_map, Tensor? active_keys, "
      "Tensor? bias, Tensor? row_table, Tensor? column_table, Tensor? scales, Tensor? k_fill, Tensor? v_fill, SymInt[] "
      "grid, SymInt[] starts, int heads, int dim, int value_dim, float scale, float normalize) -> Tensor",
      TORCH_BOX(&window_attention));
  ops.add(
      "window_attention_(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, Tensor block_map, Tensor? "
      "active_keys, "
      "Tensor? bias, Tensor? row_table, Tensor? column_table, Tensor? scales, Tensor? k_fill, Tensor? v_fill, Tensor? "
      "row_order, Tensor? row_lengths, Tensor? key_order, Tensor? key_lengths, SymInt[] grid, SymInt[] starts, int "
      "heads, int dim, int value_dim, float scale, float normalize, Tensor(a!) out) -> ()",
      TORCH_BOX(&window_attention_));
}

}  // namespace
}  // namespace sbnet::binding
