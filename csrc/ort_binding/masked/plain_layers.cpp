// The ops of core/masked/plain_layers.h, by what they say of themselves.
#include "core/masked/plain_layers.h"

#include <algorithm>
#include <tuple>

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

// Their numbers as attributes.
struct AttributeNumbers {
  const Attributes& a;

  void integer(const char* name, int32_t* to, int32_t otherwise) { put(name, a.integer(name, otherwise), to); }
  void optional_integer(const char* name, int32_t* to) { integer(name, to, 0); }
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
    if (!given(name, to)) raise_expected(a.op(), name, kCount, " ints, got no attribute");
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
    if (values.size() != kCount) raise_expected(a.op(), name, kCount, " numbers, got ", values.size());
    for (size_t k = 0; k < kCount; ++k) put(name, values[k], &to[k]);
    return true;
  }
  void put(const char* name, int64_t value, int32_t* to) {
    if (value < INT32_MIN || value > INT32_MAX) raise_expected(a.op(), name, "numbers of 32 bits, got ", value);
    *to = static_cast<int32_t>(value);
  }
};

constexpr auto kOfTypes = std::make_tuple(kFloatTypes, kBiasTypes);  // of a layer without vectors, with them

// Their further tensors: how many, which inputs, and what a run has there.
struct CountTensors {
  size_t count = 0, vectors = 0;
  constexpr void vector(const char*, const void**, DType*) { ++count, ++vectors; }
  constexpr void map(const char*, TensorView*) { ++count; }
};
template <class L>
constexpr CountTensors further() {
  typename L::Params p = {};
  CountTensors read;
  L::tensors(p, read);
  return read;
}
struct ListTensors {
  Argument* next;
  constexpr void vector(const char* name, const void**, DType*) { *next++ = {name, kBias, kOptional}; }
  constexpr void map(const char* name, TensorView*) { *next++ = {name, kT, kOptional}; }
};
template <class L>
constexpr auto inputs() {
  constexpr size_t kFurther = further<L>().count;
  Argument all[kFurther + 1] = {};
  typename L::Params p = {};
  ListTensors list{all};
  L::tensors(p, list);
  return layer_inputs_of<kFurther>({{"x", kT}}, all);
}
struct ReadTensors {
  const Context& c;
  TensorView y;
  size_t next;
  bool typed = false;
  void vector(const char*, const void** to, DType* dtype) {
    if (!typed) *dtype = y.dtype;
    typed = true;
    *to = bias_of(c, next++, y.size[1], dtype);
  }
  void map(const char*, TensorView* to) {
    const Tensor t = c.input(next++, 4);
    if (!t.present) return;
    *to = plane_view(t);
    broadcast(y, to);
  }
};

template <class L>
class Plain {
 public:
  static constexpr const char* kName = L::kName;
  static constexpr auto kInputs = inputs<L>();
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr const auto& kTypes = std::get<further<L>().vectors ? 1 : 0>(kOfTypes);
  static constexpr size_t kFirstFurther = 4;
  static constexpr int kInPlace = static_cast<int>(kInputs.size()) - 1;  // base

  explicit Plain(const Attributes& a) : layer_(a, {1, kFirstFurther + further<L>().count}) {
    AttributeNumbers read{a};
    L::numbers(params_, read);
    check(L::check(params_));
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(0, 4);
    layer_.infer(s, output(x.empty() ? Dims(4) : x));
  }
  void compute(Context& c) const {
    const Tensor x = c.input(0, 4);
    std::vector<int64_t> shape;
    for (const Dim& d : output({x.shape.begin(), x.shape.end()})) shape.push_back(d.value);
    typename L::Params p = params_;
    ReadTensors read{c, plane_view(nullptr, shape, x.dtype), kFirstFurther};
    L::tensors(p, read);
    layer_.compute(c, p, shape, [&] {
      if constexpr (std::is_null_pointer_v<decltype(L::workspace)>) {
        return L::kernels(c, &p);
      } else {
        const Workspace scratch(c, L::workspace(&p));
        return L::kernels(c, &p, scratch.data());
      }
    });
  }

 private:
  Dim size(int d, const Dim& x) const {
    if (params_.y.size[d]) return params_.y.size[d];
    return x.map([&](int64_t known) {
      int64_t y;
      check(L::size(params_, d, known, &y));
      return y;
    });
  }
  Dims output(const Dims& x) const { return {x[0], size(2, x[1]), size(3, x[2]), size(1, x[3])}; }

  MaskedLayer layer_;
  typename L::Params params_ = {};
};

template <class... L>
bool register_all(LayerList<L...>) {
  return register_ops(add_all<Plain<L>...>);
}
[[maybe_unused]] const bool kRegistered = register_all(PlainLayers());

}  // namespace
}  // namespace sbnet::ort
