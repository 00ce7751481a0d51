#include "core/attention/window_attention.h"

#include <limits>

#include "core/masked/fill.h"
#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct WindowAttention {
  static constexpr const char* kName = "window_attention";
  enum Position {
    kQ,
    kK,
    kV,
    kRows,
    kKeys,
    kBlockMap,
    kActiveKeys,
    kBiases,
    kRowTable,
    kColumnTable,
    kScales,
    kKFill,
    kVFill
  };
  // clang-format off
  static constexpr Argument kInputs[] = {{"q", kT},
                                         {"k", kT},
                                         {"v", kT},
                                         {"rows", kInt64},
                                         {"keys", kInt64},
                                         {"block_map", kInt32},
                                         {"active_keys", kBool, kOptional},
                                         {"bias", kT, kOptional},
                                         {"row_table", kT, kOptional},
                                         {"column_table", kT, kOptional},
                                         {"scales", kT, kOptional},
                                         {"k_fill", kT, kOptional},
                                         {"v_fill", kT, kOptional}};
  // clang-format on
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  std::vector<int64_t> starts;
  int32_t heads, dim, value_dim;
  float scale, normalize;

  explicit WindowAttention(const Attributes& a)
      : grid(a),
        starts(a.integers("starts")),
        heads(count(a, "heads")),
        dim(count(a, "dim")),
        value_dim(count(a, "value_dim")),
        scale(a.real("scale", std::numeric_limits<float>::quiet_NaN())),
        normalize(a.real("normalize", 0.0f)) {
    if (starts.empty()) starts = {0, 0, 0};
  }
  static int32_t count(const Attributes& a, const char* name) {
    const int64_t v = a.required_integer(name);
    if (v < 1 || v > INT32_MAX) raise_expected(kName, name, "1 or more, of 32 bits, got ", v);
    return static_cast<int32_t>(v);
  }

  void infer(ShapeContext& s) const {
    const Dims q = s.input(kQ, 4);
    s.input(kK, 4), s.input(kV, 4), s.input(kRows, 2), s.input(kKeys, 2), s.input(kBlockMap, 3);
    if (!q.empty()) s.output(0, {q[0], q[1], q[2], Dim(int64_t{heads} * value_dim)});
  }

  void compute(Context& c) const {
    const Tensor q = c.input(kQ, 4), k = c.input(kK, 4), v = c.input(kV, 4), rows = c.input(kRows, 2),
                 keys = c.input(kKeys, 2), map = c.input(kBlockMap, 3), bias = c.input(kBiases, 4),
                 row_table = c.input(kRowTable, 3), column_table = c.input(kColumnTable, 3);
    WindowAttentionParams p = {};
    p.q = plane_view(q), p.k = plane_view(k), p.v = plane_view(v);
    if (starts.size() != 3) raise_expected(kName, "starts", "3 numbers, got ", starts.size());
    std::copy(starts.begin(), starts.end(), p.starts);
    p.heads = heads, p.dim = dim, p.value_dim = value_dim;
    p.windows = int32(kName, rows, 0), p.rows = int32(kName, rows, 1), p.keys = int32(kName, keys, 1);
    if (keys.shape[0] != p.windows)
      raise_expected(kName, "keys", "the ", p.windows, " windows of rows, got ", keys.shape[0]);
    p.row_index = static_cast<const int64_t*>(rows.data), p.key_index = static_cast<const int64_t*>(keys.data);
    p.grid = grid.over(q.shape[1], q.shape[2]);
    p.block_map = c.int32(map, {q.shape[0], p.grid.count[0], p.grid.count[1]});
    p.active_keys =
        static_cast<const uint8_t*>(numbers(c, kActiveKeys, size_product({k.shape[0], k.shape[1], k.shape[2]})));
    if (bias.present) {
      p.bias_windows = bias.shape[0];
      if (p.bias_windows != 1 && p.bias_windows != p.windows)
        raise_expected(kName, "bias", "one or ", p.windows, " windows, got ", p.bias_windows);
    }
    p.bias = {numbers(c, kBiases, size_product({p.bias_windows, heads, p.rows, p.keys})), q.dtype};
    if (row_table.present != column_table.present)
      raise_expected(kName, "row_table, column_table", "both or none, got one");
    if (row_table.present) p.table_rows = int32(kName, row_table, 0), p.table_columns = int32(kName, column_table, 0);
    p.row_table = numbers(c, kRowTable, size_product({p.table_rows, p.table_rows, dim}));
    p.column_table = numbers(c, kColumnTable, size_product({p.table_columns, p.table_columns, dim}));
    p.scales = {numbers(c, kScales, heads), q.dtype};
    p.k_fill = numbers(c, kKFill, size_product({heads, dim})),
    p.v_fill = numbers(c, kVFill, size_product({heads, value_dim}));
    p.scale = scale, p.normalize = normalize;
    const std::vector<int64_t> shape = {q.shape[0], q.shape[1], q.shape[2], size_product({heads, value_dim})};
    p.out = plane_view(nullptr, shape, q.dtype);
    check(validate(p));  // before an output of an absurd size is asked for
    p.out.data = c.output(0, shape);
    check(SBNET_KERNELS(window_attention)(c, &p));
    FillParams f = {};
    f.x = f.y = p.out, f.block_map = p.block_map, f.grid = p.grid;
    check(SBNET_KERNELS(sparse_fill)(c, &f));
  }

 private:
  static int32_t int32(const char* op, const Tensor& t, size_t d) {
    if (t.shape[d] > INT32_MAX) raise_expected(op, t.name, "fewer than 2^31, got ", t.shape[d]);
    return static_cast<int32_t>(t.shape[d]);
  }
  // So many of an optional input.
  static const void* numbers(const Context& c, size_t at, int64_t count) {
    const Tensor t = c.input(at);
    if (t.present && t.elements() != count) raise_expected(kName, t.name, count, " elements, got ", t.elements());
    return t.data;
  }
};

}  // namespace

SBNET_ORT_OPS(WindowAttention)

}  // namespace sbnet::ort
