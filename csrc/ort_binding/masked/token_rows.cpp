#include "core/masked/token_rows.h"

#include <algorithm>

#include "core/masked/fill.h"
#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

int32_t count_of(const Attributes& a, const char* name, int64_t otherwise) {
  const int64_t v = a.integer(name, otherwise);
  if (v < 0 || v > INT32_MAX) raise_expected(a.op(), name, "0 or more, of 32 bits, got ", v);
  return static_cast<int32_t>(v);
}

const int64_t* int64s(const Context& c, const Tensor& t, const std::vector<int64_t>& shape) {
  if (t.shape != shape) raise_expected(c.op(), t.name, shape[0], " x ", shape[1], ", got another shape");
  return static_cast<const int64_t*>(t.data);
}

// [images, rows, channels], packed.
Rows rows_of(void* data, const std::vector<int64_t>& s) { return {data, s[0], s[1], size_product({s[1], s[2]}), s[2]}; }
Rows rows_of(const Tensor& t) { return rows_of(const_cast<void*>(t.data), t.shape); }

struct PackTokens {
  static constexpr const char* kName = "pack_tokens";
  static constexpr Argument kInputs[] = {{"block_map", kInt32}};
  static constexpr Argument kOutputs[] = {
      {"lengths", kInt32}, {"order", kInt64}, {"rows", kInt64}, {"mask", kBool}, {"filled", kBool}};
  static constexpr Types kTypes[] = {{kInt32, kInt32}};
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  PackTokensParams numbers = {};

  explicit PackTokens(const Attributes& a) : grid(a) {
    const Pair size = a.required_pair("size");
    numbers.height = size[0], numbers.width = size[1];
    numbers.prefix = count_of(a, "prefix", 0), numbers.suffix = count_of(a, "suffix", 0);
    const int64_t capacity = a.integer("capacity", -1);
    if (capacity > INT32_MAX) raise_expected(kName, "capacity", "32 bits, got ", capacity);
    numbers.capacity = static_cast<int32_t>(capacity < 0 ? std::min<int64_t>(numbers.tokens(), INT32_MAX) : capacity);
    numbers.grid = grid.over(size[0], size[1]);
    check(validate(numbers));
  }

  void infer(ShapeContext& s) const {
    const Dims map = s.input(0, 3);
    const Dim batch = map.empty() ? Dim() : map[0];
    s.output(0, {batch});
    for (const size_t at : {1, 4}) s.output(at, {batch, Dim(numbers.capacity)});
    for (const size_t at : {2, 3}) s.output(at, {batch, Dim(numbers.tokens())});
  }

  void compute(Context& c) const {
    const Tensor map = c.input(0, 3);
    PackTokensParams p = numbers;
    p.batch = map.shape[0];
    p.block_map = c.int32(map, {p.batch, p.grid.count[0], p.grid.count[1]});
    const std::vector<int64_t> held = {p.batch, p.capacity}, each = {p.batch, p.tokens()};
    p.lengths = static_cast<int32_t*>(c.output(0, {p.batch}));
    p.order = static_cast<int64_t*>(c.output(1, held)), p.rows = static_cast<int64_t*>(c.output(2, each));
    p.mask = static_cast<uint8_t*>(c.output(3, each)), p.filled = static_cast<uint8_t*>(c.output(4, held));
    check(SBNET_KERNELS(pack_tokens)(c, &p));
  }
};

struct MoveRows {
  static constexpr const char* kName = "move_rows";
  enum Position { kX, kTable, kIndex, kLengths, kMask };
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"table", kT, kOptional},
                                         {"index", kInt64, kOptional},
                                         {"lengths", kInt32, kOptional},
                                         {"mask", kBool, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  int32_t rows, start;

  explicit MoveRows(const Attributes& a) : start(count_of(a, "start", 0)) {
    const int64_t given = a.required_integer("rows");
    if (given < 0 || given > INT32_MAX) raise_expected(kName, "rows", "0 or more, of 32 bits, got ", given);
    rows = static_cast<int32_t>(given);
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 3);
    Dim batch;
    for (const size_t at : {size_t{kIndex}, size_t{kMask}, size_t{kLengths}}) {
      const Dims by = s.input(at, at == kLengths ? 1 : 2);
      if (!by.empty() && !batch.known()) batch = by[0];
    }
    if (!x.empty()) s.output(0, {batch, Dim(rows), x[2]});
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 3), table = c.input(kTable, 3), index = c.input(kIndex, 2),
                 lengths = c.input(kLengths, 1), mask = c.input(kMask, 2);
    MoveRowsParams p = {};
    p.channels = x.shape[2], p.element_bytes = static_cast<int32_t>(dtype_size(x.dtype));
    p.start = start, p.clear = true;
    const Tensor& by = index.present ? index : mask.present ? mask : lengths.present ? lengths : x;
    const std::vector<int64_t> each = {by.shape[0], rows}, shape = {by.shape[0], rows, p.channels};
    p.x = rows_of(x), p.out = rows_of(nullptr, shape);
    if (table.present) {
      if (table.shape[2] != p.channels) raise_expected(kName, "table", p.channels, " channels, got ", table.shape[2]);
      p.table = rows_of(table);
    }
    if (index.present) p.index = int64s(c, index, each);
    if (lengths.present) p.lengths = c.int32(lengths, {each[0]});
    if (mask.present) {
      if (mask.shape != each) raise_expected(kName, "mask", each[0], " x ", each[1], ", got another shape");
      p.mask = static_cast<const uint8_t*>(mask.data);
    }
    check(validate(p));
    p.out.data = c.output(0, shape);
    check(SBNET_KERNELS(move_rows)(c, &p));
  }
};

struct PackPatches {
  static constexpr const char* kName = "pack_patches";
  static constexpr Argument kInputs[] = {{"x", kT}, {"index", kInt64}, {"lengths", kInt32}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  Pair patch;

  explicit PackPatches(const Attributes& a) : patch(a.required_pair("patch")) {
    for (const int32_t side : patch)
      if (side < 1) raise_expected(kName, "patch", "at least 1 x 1, got ", patch[0], " x ", patch[1]);
  }

  int64_t numbers(int64_t channels) const { return size_product({channels, patch[0], patch[1]}); }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(0, 4), index = s.input(1, 2);
    s.input(2, 1);
    if (!x.empty() && !index.empty())
      s.output(0, {index[0], index[1], x[1].map([&](int64_t v) { return numbers(v); })});
  }

  void compute(Context& c) const {
    const Tensor x = c.input(0, 4), index = c.input(1, 2), lengths = c.input(2, 1);
    PackPatchesParams p = {};
    p.x = plane_view(x, true);
    const std::vector<int64_t> shape = {index.shape[0], index.shape[1], numbers(x.shape[1])};
    p.out = rows_of(nullptr, shape);
    p.patch[0] = patch[0], p.patch[1] = patch[1];
    p.index = static_cast<const int64_t*>(index.data);
    p.lengths = c.int32(lengths, {shape[0]});
    p.clear = true;
    check(validate(p));
    p.out.data = c.output(0, shape);
    check(SBNET_KERNELS(pack_patches)(c, &p));
  }
};

struct MergePixels {
  static constexpr const char* kName = "merge_pixels";
  static constexpr Argument kInputs[] = {{"x", kT}, {"block_map", kInt32}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  MergePixelsParams numbers = {};

  explicit MergePixels(const Attributes& a) : grid(a) {
    const int64_t factor = a.required_integer("factor");
    if (factor < 1 || factor > INT32_MAX) raise_expected(kName, "factor", "at least 1, got ", factor);
    numbers.factor = static_cast<int32_t>(factor);
    const std::vector<int64_t> offsets = a.required_integers("offsets");
    if (offsets.empty() || offsets.size() % 2 || offsets.size() > 2 * kMostOffsets)
      raise_expected(kName, "offsets", "1 to ", kMostOffsets, " pairs, got ", offsets.size(), " numbers");
    numbers.count = static_cast<int32_t>(offsets.size() / 2);
    for (size_t i = 0; i < offsets.size(); ++i)
      numbers.offsets[i / 2][i % 2] = static_cast<int32_t>(std::clamp<int64_t>(offsets[i], -1, INT32_MAX));
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(0, 4);
    s.input(1, 3);
    if (x.empty()) return;
    const auto side = [&](int64_t v) { return v / numbers.factor; };
    s.output(0, {x[0], x[1].map(side), x[2].map(side), x[3].map([&](int64_t v) { return v * numbers.count; })});
  }

  void compute(Context& c) const {
    const Tensor x = c.input(0, 4), map = c.input(1, 3);
    MergePixelsParams p = numbers;
    const std::vector<int64_t> shape = {x.shape[0], x.shape[1] / p.factor, x.shape[2] / p.factor,
                                        size_product({x.shape[3], p.count})};
    p.x = plane_view(x), p.out = plane_view(nullptr, shape, x.dtype);
    p.grid = grid.over(shape[1], shape[2]);
    p.block_map = c.int32(map, {x.shape[0], p.grid.count[0], p.grid.count[1]});
    check(validate(p));
    p.out.data = c.output(0, shape);
    check(SBNET_KERNELS(merge_pixels)(c, &p));
    FillParams f = {};
    f.x = f.y = p.out, f.block_map = p.block_map, f.grid = p.grid;
    check(SBNET_KERNELS(sparse_fill)(c, &f));
  }
};

}  // namespace

SBNET_ORT_OPS(PackTokens, MoveRows, PackPatches, MergePixels)

}  // namespace sbnet::ort
