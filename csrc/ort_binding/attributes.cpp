// Attributes of a node, as a kernel or as shape inference sees them.
#include <cmath>
#include <cstring>

#include "core/grid.h"
#include "ort_binding/common.h"

namespace sbnet::ort {

namespace {

int32_t to_int32(const char* op, const char* name, int64_t v) {
  if (v < INT32_MIN || v > INT32_MAX) raise_expected(op, name, "a number of 32 bits, got ", v);
  return static_cast<int32_t>(v);
}

}  // namespace

int64_t Attributes::integer(const char* name, int64_t otherwise) const {
  int64_t v = otherwise;
  get(name, &v);
  return v;
}

bool Attributes::flag(const char* name, bool otherwise) const {
  const int64_t v = integer(name, otherwise);
  if (v != 0 && v != 1) raise_expected(op_, name, "0 or 1, got ", v);
  return v == 1;
}

float Attributes::real(const char* name, float otherwise) const {
  float v = otherwise;
  if (!get(name, &v) && std::isnan(otherwise)) raise_expected(op_, name, "a float, got no attribute");
  return v;
}

std::string Attributes::text(const char* name, const char* otherwise) const {
  std::string v = otherwise;
  get(name, &v);
  return v;
}

std::optional<Pair> Attributes::pair(const std::string& name) const {
  std::vector<int64_t> v;
  if (!get(name.c_str(), &v)) return std::nullopt;
  if (v.size() != 2) raise_expected(op_, name, "2 numbers, got ", v.size());
  return Pair{to_int32(op_, name.c_str(), v[0]), to_int32(op_, name.c_str(), v[1])};
}

Pair Attributes::pair(const char* name, int32_t otherwise) const {
  return pair(std::string(name)).value_or(Pair{otherwise, otherwise});
}

Pair Attributes::required_pair(const std::string& name) const {
  require(name.c_str());
  const std::optional<Pair> v = pair(name);
  if (!v) raise_expected(op_, name, "two ints, got no attribute");
  return *v;
}

int64_t Attributes::required_integer(const char* name) const {
  int64_t v = 0;
  require(name);
  if (!get(name, &v)) raise_expected(op_, name, "an int, got no attribute");
  return v;
}

std::vector<int64_t> Attributes::required_integers(const char* name) const {
  std::vector<int64_t> v;
  require(name);
  if (!get(name, &v)) raise_expected(op_, name, "ints, got no attribute");
  return v;
}

std::vector<int64_t> Attributes::integers(const char* name) const {
  std::vector<int64_t> v;
  get(name, &v);
  return v;
}

namespace {

class KernelAttributes final : public Attributes {
 public:
  KernelAttributes(const char* op, const OrtKernelInfo* info, bool cuda) : Attributes(op), info_(info), cuda_(cuda) {}
  bool is_constant(size_t input) const override { return value_of(input); }
  Tensor constant_on_cpu(const char* name, size_t input) const override {
    const OrtValue* value = cuda_ ? nullptr : value_of(input);
    return value ? tensor_of(op(), name, value) : Tensor{name};
  }

 private:
  const OrtValue* value_of(size_t input) const {
    int constant = 0;
    const OrtValue* value = nullptr;
    check(api->KernelInfoGetConstantInput_tensor(info_, input, &constant, &value));
    return constant ? value : nullptr;
  }
  // Asking for a list finds an attribute of any type (and an empty list where it is of another).
  bool exists(const char* name, size_t* numbers) const {
    return succeeded(api->KernelInfoGetAttributeArray_int64(info_, name, nullptr, numbers));
  }
  bool found(OrtStatus* status, const char* name, const char* expected) const {
    size_t numbers = 0;
    if (succeeded(status)) return true;
    if (exists(name, &numbers)) raise_expected(op(), name, expected, ", got another type");
    return false;
  }
  bool get(const char* name, int64_t* out) const override {
    return found(api->KernelInfoGetAttribute_int64(info_, name, out), name, "an int");
  }
  bool get(const char* name, float* out) const override {
    return found(api->KernelInfoGetAttribute_float(info_, name, out), name, "a float");
  }
  bool get(const char* name, std::string* out) const override {
    size_t size = 0;
    if (!found(api->KernelInfoGetAttribute_string(info_, name, nullptr, &size), name, "a string")) return false;
    std::string text(size + 1, '\0');
    check(api->KernelInfoGetAttribute_string(info_, name, text.data(), &size));
    *out = text.c_str();
    return true;
  }
  bool get(const char* name, std::vector<int64_t>* out) const override {
    size_t size = 0;
    if (!exists(name, &size)) return false;
    out->resize(size);
    if (size) check(api->KernelInfoGetAttributeArray_int64(info_, name, out->data(), &size));
    return true;
  }
  const OrtKernelInfo* info_;
  bool cuda_;
};

class ShapeAttributes final : public Attributes {
 public:
  ShapeAttributes(const char* op, const OrtShapeInferContext* context) : Attributes(op), context_(context) {}

 private:
  const OrtOpAttr* find(const char* name) const {
    const OrtOpAttr* attribute = nullptr;
    return succeeded(api->ShapeInferContext_GetAttribute(context_, name, &attribute)) ? attribute : nullptr;
  }
  // A list or string, of any length. False: there is no such attribute.
  template <class Items>
  bool read(const char* name, AttributeType type, const char* expected, Items* items) const {
    const OrtOpAttr* attribute = find(name);
    if (!attribute) return false;
    constexpr size_t kItem = sizeof(items->front());
    size_t bytes = 0;
    items->resize(64);
    if (succeeded(api->ReadOpAttr(attribute, type, items->data(), items->size() * kItem, &bytes))) {
      items->resize(bytes / kItem);
      return true;
    }
    items->resize(bytes / kItem);  // what it would have written
    if (!bytes || !succeeded(api->ReadOpAttr(attribute, type, items->data(), bytes, &bytes)))
      raise_expected(op(), name, expected, ", got another type");
    return true;
  }
  template <class T>
  bool read_one(const char* name, AttributeType type, const char* expected, T* out) const {
    const OrtOpAttr* attribute = find(name);
    size_t bytes = 0;
    if (attribute && !succeeded(api->ReadOpAttr(attribute, type, out, sizeof(*out), &bytes)))
      raise_expected(op(), name, expected, ", got another type");
    return attribute;
  }
  bool get(const char* name, int64_t* out) const override { return read_one(name, kInt, "an int", out); }
  bool get(const char* name, float* out) const override { return read_one(name, kReal, "a float", out); }
  bool get(const char* name, std::string* out) const override {
    if (!read(name, kString, "a string", out)) return false;
    out->resize(std::strlen(out->c_str()));
    return true;
  }
  bool get(const char* name, std::vector<int64_t>* out) const override {
    return read(name, kInts, "a list of ints", out);
  }
  const OrtShapeInferContext* context_;
};

}  // namespace

namespace {

std::unique_ptr<Attributes> of_a_known_format(std::unique_ptr<Attributes> a) {
  const int64_t format = a->integer("format", 1);
  if (format < 1 || format > kFormat)
    raise_expected(a->op(), "format", "1 to ", kFormat, ", got ", format,
                   ": the model is of a newer sbnet than this library");
  return a;
}

}  // namespace

std::unique_ptr<Attributes> attributes_of(const char* op, const OrtKernelInfo* info, bool cuda) {
  return of_a_known_format(std::make_unique<KernelAttributes>(op, info, cuda));
}
std::unique_ptr<Attributes> attributes_of(const char* op, const OrtShapeInferContext* context) {
  return of_a_known_format(std::make_unique<ShapeAttributes>(op, context));
}

GridAttributes::GridAttributes(const Attributes& a, const std::string& prefix)
    : op_(a.op()),
      size_(a.required_pair(prefix + "bsize")),
      stride_(a.pair(prefix + "bstride").value_or(size_)),
      offset_(a.pair(prefix + "boffset").value_or(Pair{0, 0})),
      count_(a.pair(prefix + "bcount")) {
  check(check_grid(op_, grid(0, 0)));
}

BlockGrid GridAttributes::grid(int64_t rows, int64_t columns) const {
  BlockGrid g;
  for (int d = 0; d < 2; ++d) {
    g.size[d] = size_[d], g.stride[d] = stride_[d], g.offset[d] = offset_[d];
    g.count[d] = count_ ? (*count_)[d] : to_int32(op_, "bcount", d == 0 ? rows : columns);
  }
  return g;
}

int64_t GridAttributes::blocks(int d, int64_t side) const {
  if (count_) return (*count_)[d];
  if (stride_[d] != size_[d] || offset_[d] != 0)
    raise_expected(op_, "bcount", "two ints where blocks do not tile the plane, got no attribute");
  return (side + size_[d] - 1) / size_[d];
}

BlockGrid GridAttributes::over(int64_t height, int64_t width) const {
  return grid(blocks(0, height), blocks(1, width));
}
BlockGrid GridAttributes::counted(int64_t rows, int64_t columns) const { return grid(rows, columns); }

}  // namespace sbnet::ort
