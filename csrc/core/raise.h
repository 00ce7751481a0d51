// Errors as the bindings raise them, in exceptions whose texts reach the user: "sbnet::op: argument: expected ..., got
// ...". Core itself returns a Status.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/layer.h"

namespace sbnet {

template <class... Parts>
[[noreturn]] void raise(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}
template <class... Parts>
[[noreturn]] void raise_expected(const std::string& op, const std::string& argument, const Parts&... parts) {
  raise("sbnet::", op, ": ", argument, ": expected ", parts...);
}
inline void check(const Status& s) {
  if (!s.ok()) raise("sbnet::", s.message);
}

inline Activation to_activation(const char* op, const std::string& name) {
  Activation activation = Activation::kNone;
  check(read_activation(op, name.c_str(), &activation));
  return activation;
}

}  // namespace sbnet
