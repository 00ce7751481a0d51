// What every sbnet entry point returns. Core and kernels never throw: bindings turn a Status into their
// framework's exception and never swallow one.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#if defined(__GNUC__)
#define SBNET_EXPORT __attribute__((visibility("default")))
#define SBNET_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define SBNET_EXPORT
#define SBNET_PRINTF(fmt, args)
#endif

namespace sbnet {

enum class Code : int32_t { kOk = 0, kInvalidArgument = 1, kUnsupported = 2, kDeviceError = 3 };

struct Status {
  Code code;
  char message[508];  // "op: argument: expected ..., got ..."
  bool ok() const { return code == Code::kOk; }
};

inline Status ok_status() { return Status{Code::kOk, {0}}; }

SBNET_PRINTF(2, 3) inline Status make_status(Code code, const char* format, ...) {
  Status s{code, {0}};
  va_list args;
  va_start(args, format);
  vsnprintf(s.message, sizeof(s.message), format, args);
  va_end(args);
  return s;
}

#define SBNET_INVALID(...) ::sbnet::make_status(::sbnet::Code::kInvalidArgument, __VA_ARGS__)
#define SBNET_CHECK(condition, ...)                      \
  do {                                                   \
    if (!(condition)) return SBNET_INVALID(__VA_ARGS__); \
  } while (0)
#define SBNET_TRY(expression)                     \
  do {                                            \
    const ::sbnet::Status status_ = (expression); \
    if (!status_.ok()) return status_;            \
  } while (0)

}  // namespace sbnet
