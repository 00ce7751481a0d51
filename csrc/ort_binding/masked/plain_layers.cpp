// The ops of core/masked/plain_layers.h, by what they say of themselves.
#include "core/masked/plain_layers.h"

#include <algorithm>
#include <utility>

#include "ort_binding/masked/layer.h"
#include "ort_binding/masked/packed_weight.h"

namespace sbnet::ort {
namespace {

// Their numbers as attributes.
struct AttributeNumbers {
  const Attributes& a;

  void integer(const char* name, int32_t* to, int32_t otherwise) { put(name, a.integer(name, otherwise), to); }
  void optional_integer(const char* name, int32_t* to) { integer(name, to, 0); }
  void dtype(const char*, DType*) {}  // an op's outputs are of one type: float
  void real(const char* name, float* to, float otherwise) { *to = a.real(name, otherwise); }
  void flag(const char* name, bool* to, bool otherwise) { *to = a.flag(name, otherwise); }
  template <class Parse>
  void text(const char* name, const char* otherwise, const Parse& parse) {
    check(parse(a.op(), a.text(name, otherwise).c_str()));
  }
  void sides(const char* name, int64_t* to) {
    if (const auto given = a.pair(name)) to[0] = (*given)[0], to[1] = (*given)[1];
  }
  template <size_t kCount>
  void required(const char* name, int32_t (&to)[kCount]) {
    put(name, a.required_integers(name), to);
  }
  template <size_t kCount>
  void integers(const char* name, int32_t (&to)[kCount], int32_t otherwise) {
    if (!given(name, to)) std::fill(to, to + kCount, otherwise);
  }
  template <size_t kCount>
  void integers(const char* name, int32_t (&to)[kCount], const int32_t (&otherwise)[kCount]) {
    if (!given(name, to)) std::copy(otherwise, otherwise + kCount, to);
  }

 private:
  template <size_t kCount>
  bool given(const char* name, int32_t (&to)[kCount]) {
    std::vector<int64_t> values;
    if (!a.integers(name, &values)) return false;
    put(name, values, to);
    return true;
  }
  template <size_t kCount>
  void put(const char* name, const std::vector<int64_t>& values, int32_t (&to)[kCount]) {
    if (values.size() != kCount) raise_expected(a.op(), name, kCount, " numbers, got ", values.size());
    for (size_t k = 0; k < kCount; ++k) put(name, values[k], &to[k]);
  }
  void put(const char* name, int64_t value, int32_t* to) {
    if (value < INT32_MIN || value > INT32_MAX) raise_expected(a.op(), name, "numbers of 32 bits, got ", value);
    *to = static_cast<int32_t>(value);
  }
};

// Their further tensors: how many, which inputs, and what a run has there.
struct CountTensors {
  size_t needed = 0, optional = 0, vectors = 0;
  constexpr void weight(const char*, TensorView*, const void**) { ++needed; }
  constexpr void scales(const char*, const float**) { ++needed; }
  constexpr void vector(const char*, const void**, DType*, const int64_t* = nullptr) { ++optional, ++vectors; }
  constexpr void plane(const char*, TensorView*) { ++optional; }
  constexpr void map(const char*, TensorView*) { ++optional; }
};
template <class L>
constexpr CountTensors further() {
  typename L::Params p = {};
  CountTensors read;
  L::tensors(p, read);
  return read;
}
// Layers of bytes have floats of 32 bits beside them.
template <class L>
constexpr bool kOfBytes = L::kOutput != OutputType::kOfX;

template <bool kBytes>
struct ListTensors {
  Argument *needed, *optional;
  constexpr void weight(const char* name, TensorView*, const void**) { *needed++ = {name, kBytes ? kWeightT : kT}; }
  constexpr void scales(const char* name, const float**) { *needed++ = {name, kFloat}; }
  constexpr void vector(const char* name, const void**, DType*, const int64_t* = nullptr) {
    *optional++ = {name, kBytes ? int32_t{kFloat} : kBias, kOptional};
  }
  constexpr void plane(const char* name, TensorView*) { *optional++ = {name, kBytes ? kResidualT : kT, kOptional}; }
  constexpr void map(const char* name, TensorView*) { *optional++ = {name, kT, kOptional}; }
};
template <class L>
constexpr int32_t output_type() {
  return L::kOutput == OutputType::kOfX ? kT : L::kOutput == OutputType::kOfWeight ? kWeightT : int32_t{kFloat};
}
// x, what it needs, its lists, what may be left out, the two inputs of the fringe, and the base.
template <class L>
constexpr auto inputs() {
  constexpr CountTensors kCounted = further<L>();
  Argument optional[kCounted.optional + 1] = {};
  std::array<Argument, kCounted.needed + kCounted.optional + 7> all = {};
  typename L::Params p = {};
  ListTensors<kOfBytes<L>> list{&all[1], optional};
  L::tensors(p, list);
  all[0] = {"x", kT};
  size_t at = 1 + kCounted.needed;
  for (const char* name : {"indices", "count", "block_map"}) all[at++] = {name, kInt32};
  for (size_t k = 0; k < kCounted.optional; ++k) all[at++] = optional[k];
  for (const char* name : {"fringe_pixels", "fringe_count"}) all[at++] = {name, kInt32, kOptional};
  all[at] = {"base", output_type<L>(), kOptional};
  return all;
}
template <class L>
constexpr auto types() {
  if constexpr (kOfBytes<L>)
    return std::array<Types, 8>{{{kInt8, kInt8, kInt8},
                                 {kInt8, kFloat, kInt8},
                                 {kFloat, kInt8, kInt8},
                                 {kFloat, kFloat, kInt8},
                                 {kFloat8, kFloat8, kFloat8},
                                 {kFloat8, kFloat, kFloat8},
                                 {kFloat, kFloat8, kFloat8},
                                 {kFloat, kFloat, kFloat8}}};
  else if constexpr (further<L>().vectors != 0)
    return kBiasTypes;
  else
    return kFloatTypes;
}

// The weights, whose sizes say which y has: of a run, or as far as they are known before.
struct ReadWeights {
  const Context& c;
  size_t needed = 1;
  void weight(const char*, TensorView* to, const void**) { *to = plane_view(c.input(needed++, 4)); }
  void scales(const char*, const float**) { ++needed; }
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) {}
  void plane(const char*, TensorView*) {}
  void map(const char*, TensorView*) {}
};
struct InferTensors {
  const ShapeContext& s;
  size_t optional, needed = 1;
  bool known = true;
  Dims like = {};  // of a plane
  void weight(const char*, TensorView* to, const void**) {
    const Dims dims = s.input(needed++, 4);
    for (size_t d = 0; d < 4; ++d) {
      known = known && !dims.empty() && dims[d].known();
      if (known) to->size[d == 0 ? 0 : d == 3 ? 1 : d + 1] = dims[d].value;  // NHWC
    }
  }
  void scales(const char*, const float**) { ++needed; }
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) { ++optional; }
  void plane(const char*, TensorView*) { like = s.input(optional++, 4); }
  void map(const char*, TensorView*) { ++optional; }
};
struct ReadTensors {
  const Context& c;
  TensorView y;
  size_t optional, needed = 1;
  void weight(const char*, TensorView*, const void**) { ++needed; }
  void scales(const char*, const float** to) {
    DType float32 = DType::kF32;
    *to = static_cast<const float*>(bias_of(c, needed++, y.size[1], &float32));
  }
  void vector(const char*, const void** to, DType* dtype, const int64_t* elements = nullptr) {
    *to = bias_of(c, optional++, elements ? *elements : y.size[1], dtype);
  }
  void plane(const char*, TensorView* to) {
    const Tensor t = c.input(optional++, 4);
    if (t.present) *to = plane_view(t);
  }
  void map(const char* name, TensorView* to) {
    plane(name, to);
    if (to->data) broadcast(y, to);
  }
};
// What is packed of constant weights, for all runs of a session.
struct PackWeights {
  const Attributes& a;
  int32_t groups;
  std::vector<PackedWeight>& all;
  size_t needed = 1;
  void weight(const char* name, TensorView*, const void** to) {
    if (to) all.emplace_back(a, name, needed, groups);
    ++needed;
  }
  void scales(const char*, const float**) { ++needed; }
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) {}
  void plane(const char*, TensorView*) {}
  void map(const char*, TensorView*) {}
};
struct ReadPacked {
  const PackedWeight* next;
  void weight(const char*, TensorView*, const void** to) {
    if (to) *to = next++->data();
  }
  void scales(const char*, const float**) {}
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) {}
  void plane(const char*, TensorView*) {}
  void map(const char*, TensorView*) {}
};

template <class L>
class Plain {
 public:
  static constexpr const char* kName = L::kName;
  static constexpr auto kInputs = inputs<L>();
  static constexpr Argument kOutputs[] = {{"y", output_type<L>()}};
  static constexpr auto kTypes = types<L>();
  static constexpr size_t kIndices = 1 + further<L>().needed, kOptionalInputs = kIndices + 3;
  static constexpr int kInPlace = static_cast<int>(kInputs.size()) - 1;  // base

  explicit Plain(const Attributes& a) : layer_(a, {kIndices, kOptionalInputs + further<L>().optional}) {
    AttributeNumbers read{a};
    L::numbers(params_, read);
    check(L::check(params_));
    PackWeights pack{a, L::groups(params_), packed_};
    L::tensors(params_, pack);
  }

  void infer(ShapeContext& s) const {
    const Dims known = s.input(0, 4), x = known.empty() ? Dims(4) : known;
    Params p = params_;
    InferTensors read{s, kOptionalInputs};
    L::tensors(p, read);
    Dims y = {x[0], {}, {}, {}};
    if (read.known) y = {x[0], size(p, 2, x[1]), size(p, 3, x[2]), size(p, 1, x[3])};
    layer_.infer(s, y, read.like);
  }
  void compute(Context& c) const {
    const Tensor x = c.input(0, 4);
    Params p = params_;
    ReadWeights weights{c};
    L::tensors(p, weights);
    std::vector<int64_t> shape = x.shape;
    for (const auto& [place, d] : {std::pair(1, 2), {2, 3}, {3, 1}}) {
      const auto at = static_cast<size_t>(place);
      check(L::size(p, d, x.shape[at], &shape[at]));
    }
    const DType dtype = L::kOutput == OutputType::kOfX        ? x.dtype
                        : L::kOutput == OutputType::kOfWeight ? c.input(1, 4).dtype
                                                              : DType::kF32;
    ReadTensors read{c, plane_view(nullptr, shape, dtype), kOptionalInputs};
    L::tensors(p, read);
    ReadPacked packed{packed_.data()};
    L::tensors(p, packed);
    layer_.compute(
        c, p, shape,
        [&] {
          if constexpr (std::is_null_pointer_v<decltype(L::workspace)>) {
            return L::kernels(c, &p);
          } else {
            const Workspace scratch(c, workspace_bytes<L>(c, p));
            return L::kernels(c, &p, scratch.data());
          }
        },
        dtype);
  }

 private:
  using Params = typename L::Params;

  // One of x that has no number: y's may have one whatever it is, or be x's whatever that is.
  static Dim size(const Params& p, int d, const Dim& x) {
    int64_t y = 0, next = 0;
    if (x.known()) return check(L::size(p, d, x.value, &y)), y;
    constexpr int64_t kLarge = 1 << 20;
    if (!L::size(p, d, kLarge, &y).ok() || !L::size(p, d, kLarge + 1, &next).ok()) return {};
    if (y == next) return y;
    return y == kLarge && next == kLarge + 1 ? x : Dim();
  }

  MaskedLayer layer_;
  Params params_ = {};
  std::vector<PackedWeight> packed_;
};

template <class... L>
bool register_all(LayerList<L...>) {
  return register_ops(add_all<Plain<L>...>);
}
[[maybe_unused]] const bool kRegistered = register_all(PlainLayers());

}  // namespace
}  // namespace sbnet::ort
