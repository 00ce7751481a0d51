// The ops of core/masked/plain_layers.h, by what they say of themselves.
#include "core/masked/plain_layers.h"

#include <algorithm>

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
  template <size_t kCount>
  void required(const char* name, int32_t (&to)[kCount]) {
    if (!given(name, to))
      raise("sbnet::", a.op(), ": ", name, ": the attribute is missing; ", kCount, " ints are wanted");
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
    if (values.size() != kCount)
      raise("sbnet::", a.op(), ": ", name, ": expected ", kCount, " numbers, got ", values.size());
    for (size_t k = 0; k < kCount; ++k) put(name, values[k], &to[k]);
    return true;
  }
  void put(const char* name, int64_t value, int32_t* to) {
    if (value < INT32_MIN || value > INT32_MAX)
      raise("sbnet::", a.op(), ": ", name, ": expected numbers of 32 bits, got ", value);
    *to = static_cast<int32_t>(value);
  }
};

template <class L>
struct Plain : PlainLayer<Plain<L>, typename L::Params> {
  static constexpr const char* kName = L::kName;

  explicit Plain(const Attributes& a) : PlainLayer<Plain<L>, typename L::Params>(a) {
    AttributeNumbers read{a};
    L::numbers(this->params_, read);
    check(L::check(this->params_));
  }
  Dim channels(const Dim& x) const { return size(1, x); }
  Dim side(int d, const Dim& x) const { return size(2 + d, x); }
  Status launch(const Context& c, const typename L::Params& p, const Parallel& parallel) const {
    return SBNET_ORT_ON_DEVICE(c, L::cpu(&p, &parallel), L::cuda(&p, c.stream()));
  }

 private:
  Dim size(int d, const Dim& x) const {
    return x.map([&](int64_t known) {
      int64_t y;
      check(L::size(this->params_, d, known, &y));
      return y;
    });
  }
};

template <class... L>
bool register_all(LayerList<L...>) {
  return register_ops(add_all<Plain<L>...>);
}
[[maybe_unused]] const bool kRegistered = register_all(PlainLayers());

}  // namespace
}  // namespace sbnet::ort
