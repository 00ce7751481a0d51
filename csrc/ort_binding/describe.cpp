// What the library's ops are, for those who ask without a runtime: their schemas as JSON, and the shapes of what a node
// gives. The exporter registers both with onnx.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "core/lists/fringe.h"
#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

template <class Items, class Text>
std::string joined(const Items& items, const Text& text) {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : ", ") + text(item);
  return all;
}

std::string number(float v) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.7g", static_cast<double>(v));
  if (std::strtof(text, nullptr) != v) std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(v));
  return text;
}

// Attributes that were not given: what has no default is 1, or a list of ones. Keeps what was asked for.
class AskedAttributes final : public Attributes {
 public:
  using Attributes::Attributes;
  mutable std::vector<std::pair<std::string, std::string>> asked;  // name and description

 private:
  mutable std::string required_;
  void require(const char* name) const override { required_ = name; }
  bool note(const char* name, const char* type, const std::string& otherwise) const {
    const bool required = required_ == name;
    for (const auto& [known, text] : asked)
      if (known == name) return required;
    asked.emplace_back(name, "{\"type\": " + quoted(type) +
                                 (required            ? ", \"required\": true}"
                                  : otherwise.empty() ? "}"
                                                      : ", \"default\": " + otherwise + "}"));
    return required;
  }
  bool get(const char* name, int64_t* out) const override {
    if (!note(name, "int", std::to_string(*out))) return false;
    *out = 1;
    return true;
  }
  bool get(const char* name, float* out) const override {
    if (std::isnan(*out)) require(name);
    if (!note(name, "float", number(*out))) return false;
    *out = 1;
    return true;
  }
  bool get(const char* name, std::string* out) const override { return note(name, "string", quoted(*out)); }
  bool get(const char* name, std::vector<int64_t>* out) const override {
    if (!note(name, "ints", "")) return false;
    out->assign(std::strcmp(name, "window") ? 2 : kWindowNumbers, 1);
    return true;
  }
};

std::string type_name(int32_t type) {
  constexpr std::pair<int32_t, const char*> kNames[] = {{kT, "T"},
                                                        {kBias, "B"},
                                                        {kWeightT, "W"},
                                                        {kResidualT, "R"},
                                                        {kFloat, "float"},
                                                        {kFloat16, "float16"},
                                                        {kBFloat16, "bfloat16"},
                                                        {kBool, "bool"},
                                                        {kUInt8, "uint8"},
                                                        {kInt8, "int8"},
                                                        {kInt32, "int32"},
                                                        {kInt64, "int64"},
                                                        {kDouble, "double"},
                                                        {kFloat8, "float8e4m3fn"}};
  for (const auto& [known, name] : kNames)
    if (known == type) return quoted(name);
  raise("sbnet: expected a type with a name, got ", type);
}

std::string argument(const Argument& a) {
  const char* kind = a.characteristic == kOptional   ? ", \"optional\": true"
                     : a.characteristic == kVariadic ? ", \"variadic\": true"
                                                     : "";
  return "{\"name\": " + quoted(a.name) + ", \"type\": " + type_name(a.type) + kind + "}";
}

std::string schema(const OpDescription& op) {
  const AskedAttributes attributes(op.name);
  op.make(attributes);
  std::vector<int32_t> variables;
  for (const auto* arguments : {&op.inputs, &op.outputs})
    for (const Argument& a : *arguments)
      if (a.type < 0 && std::find(variables.begin(), variables.end(), a.type) == variables.end())
        variables.push_back(a.type);
  const auto types = [&](const Types& t) {
    return "{" + joined(variables, [&](int32_t v) { return type_name(v) + ": " + type_name(t(v)); }) + "}";
  };
  const auto attribute = [](const auto& a) { return quoted(a.first) + ": " + a.second; };
  return "{\"name\": " + quoted(op.name) + ", \"inputs\": [" + joined(op.inputs, argument) + "], \"outputs\": [" +
         joined(op.outputs, argument) + "], \"attributes\": {" + joined(attributes.asked, attribute) +
         "}, \"types\": [" + joined(op.types, types) + "]}";
}

std::map<std::string, OpDescription> described() {
  std::map<std::string, OpDescription> found;
  const std::function<void(const OpDescription&)> describe = [&](const OpDescription& op) {
    found.emplace(op.name, op);
  };
  add_registered_ops({{}, false, nullptr, &describe});
  return found;
}
const std::map<std::string, OpDescription>& ops() {
  static const auto& all = *new std::map<std::string, OpDescription>(described());  // never destroyed
  return all;
}

// ---- a node, as text: fields between tabs, a line each for its op ("op", name), its attributes ("int", "float" or
// "string", name, value; "ints", name, values) and the inputs whose rank is known ("input", index, sizes). A size is a
// number, $ and a symbol, or ?.

using Fields = std::vector<std::string>;

Fields split(const std::string& text, char at) {
  Fields fields(1);
  for (const char c : text)
    if (c == at)
      fields.emplace_back();
    else
      fields.back() += c;
  return fields;
}

class GivenAttributes final : public Attributes {
 public:
  GivenAttributes(const char* op, const std::vector<Fields>& lines) : Attributes(op), lines_(lines) {}

 private:
  const Fields* find(const char* type, const char* name) const {
    for (const Fields& line : lines_)
      if (line[0] != "input" && line[0] != "op" && line[1] == name) {
        if (line[0] != type) raise_expected(op(), name, type, ", got ", line[0]);
        return &line;
      }
    return nullptr;
  }
  bool get(const char* name, int64_t* out) const override {
    const Fields* line = find("int", name);
    if (line) *out = std::stoll((*line)[2]);
    return line;
  }
  bool get(const char* name, float* out) const override {
    const Fields* line = find("float", name);
    if (line) *out = std::stof((*line)[2]);
    return line;
  }
  bool get(const char* name, std::string* out) const override {
    const Fields* line = find("string", name);
    if (line) *out = (*line)[2];
    return line;
  }
  bool get(const char* name, std::vector<int64_t>* out) const override {
    const Fields* line = find("ints", name);
    if (!line) return false;
    out->clear();
    for (size_t k = 2; k < line->size(); ++k) out->push_back(std::stoll((*line)[k]));
    return true;
  }
  const std::vector<Fields>& lines_;
};

class GivenShapes final : public ShapeContext {
 public:
  GivenShapes(const OpDescription& op, const std::vector<Fields>& lines)
      : ShapeContext(op.name, op.inputs.data(), op.outputs.data(), nullptr), lines_(lines) {}
  using ShapeContext::input;
  Dims input(size_t index) const override {
    Dims dims;
    for (const Fields& line : lines_)
      if (line[0] == "input" && std::stoull(line[1]) == index)
        for (size_t k = 2; k < line.size(); ++k) {
          dims.emplace_back();
          if (line[k][0] == '$')
            dims.back().symbol = line[k].substr(1);
          else if (line[k] != "?")
            dims.back().value = std::stoll(line[k]);
        }
    return dims;
  }
  void output(size_t index, const Dims& dims) override {
    outputs_.resize(std::max(outputs_.size(), index + 1), "?");
    outputs_[index] =
        "[" +
        joined(dims,
               [](const Dim& d) {
                 return d.known() ? std::to_string(d.value) : d.symbol.empty() ? "null" : quoted(d.symbol);
               }) +
        "]";
  }
  std::string text() const {
    return "[" + joined(outputs_, [](const std::string& dims) { return dims == "?" ? "null" : dims; }) + "]";
  }

 private:
  const std::vector<Fields>& lines_;
  std::vector<std::string> outputs_;
};

std::string shapes(const std::string& node) {
  std::vector<Fields> lines;
  for (const std::string& line : split(node, '\n')) lines.push_back(split(line, '\t'));
  const auto op = ops().find(lines[0].at(1));
  if (op == ops().end()) raise("sbnet::", lines[0][1], ": expected an op of the library");
  GivenShapes made(op->second, lines);
  op->second.infer(GivenAttributes(op->second.name, lines), made);
  return made.text();
}

}  // namespace
}  // namespace sbnet::ort

// The ops of the library: a JSON list of name, inputs, outputs, attributes and the types that variables stand for.
extern "C" SBNET_EXPORT const char* sbnet_ort_schemas() {
  using namespace sbnet::ort;
  static const std::string text = "[" + joined(ops(), [](const auto& op) { return schema(op.second); }) + "]";
  return text.c_str();
}

// The shapes of a node's outputs, a JSON list; or what is wrong with the node, which begins with "sbnet". Until the
// thread's next call.
extern "C" SBNET_EXPORT const char* sbnet_ort_shapes(const char* node) {
  thread_local std::string text;
  try {
    text = sbnet::ort::shapes(node);
  } catch (const std::exception& e) {
    text = e.what();
  }
  return text.c_str();
}
