// Runs a masked network in ONNX Runtime, without Python and PyTorch:
//
//   masked MODEL LIBSBNET [OUTPUT]
//
// MODEL takes a frame [N,C,H,W] float and a mask [N,H,W] bool, of any names and in any order, and its first output is
// float, as `sbnet export` and `sbnet sparsify` write it. The frame is noise, the mask a rectangle; OUTPUT receives the
// first output as raw floats.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#else
#include "ort_c_api.h"
#endif
#include "ort_slots.h"

namespace {

const OrtApi* ort = nullptr;

void check(OrtStatus* status) {
  if (!status) return;
  const std::string text = ort->GetErrorMessage(status);
  ort->ReleaseStatus(status);
  throw std::runtime_error(text);
}

// Owned objects of the C API.
template <class T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

std::vector<int64_t> shape_of(const OrtTensorTypeAndShapeInfo* info) {
  size_t rank = 0;
  check(ort->GetDimensionsCount(info, &rank));
  std::vector<int64_t> shape(rank);
  check(ort->GetDimensions(info, shape.data(), rank));
  return shape;
}

// A name that the session made for us.
std::string taken(OrtAllocator* allocator, char* name) {
  const std::string text = name;
  check(ort->AllocatorFree(allocator, name));
  return text;
}

struct Input {
  std::string name;
  std::vector<int64_t> shape;
  ONNXTensorElementDataType type;
};

std::vector<Input> inputs_of(const OrtSession* session, OrtAllocator* allocator) {
  size_t count = 0;
  check(ort->SessionGetInputCount(session, &count));
  std::vector<Input> found;
  for (size_t k = 0; k < count; ++k) {
    char* name = nullptr;
    check(ort->SessionGetInputName(session, k, allocator, &name));
    Input input{taken(allocator, name), {}, {}};
    OrtTypeInfo* made = nullptr;
    check(ort->SessionGetInputTypeInfo(session, k, &made));
    const Owned<OrtTypeInfo> type(made, ort->ReleaseTypeInfo);
    const OrtTensorTypeAndShapeInfo* info = nullptr;  // belongs to the type
    check(ort->CastTypeInfoToTensorInfo(type.get(), &info));
    if (!info) throw std::runtime_error(input.name + ": expected a tensor");
    check(ort->GetTensorElementType(info, &input.type));
    input.shape = shape_of(info);
    for (const int64_t side : input.shape)
      if (side <= 0) throw std::runtime_error(input.name + ": expected a model of fixed shapes");
    found.push_back(input);
  }
  return found;
}

// The one input of a type and so many dimensions.
const Input& only(const std::vector<Input>& inputs, ONNXTensorElementDataType type, size_t rank, const char* what) {
  const Input* found = nullptr;
  for (const Input& input : inputs)
    if (input.type == type && input.shape.size() == rank) {
      if (found)
        throw std::runtime_error(std::string("expected one ") + what + ", got " + found->name + " and " + input.name);
      found = &input;
    }
  if (!found) throw std::runtime_error(std::string("expected ") + what + " among the inputs, got none");
  return *found;
}

template <class T>
Owned<OrtValue> tensor(const OrtMemoryInfo* memory, std::vector<T>& data, const std::vector<int64_t>& shape,
                       ONNXTensorElementDataType type) {
  OrtValue* made = nullptr;
  check(ort->CreateTensorWithDataAsOrtValue(memory, data.data(), data.size() * sizeof(T), shape.data(), shape.size(),
                                            type, &made));
  return {made, ort->ReleaseValue};
}

void run(const char* model, const char* kernels, const char* output) {
  OrtEnv* env_made = nullptr;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "masked", &env_made));
  const Owned<OrtEnv> env(env_made, ort->ReleaseEnv);
  OrtSessionOptions* options_made = nullptr;
  check(ort->CreateSessionOptions(&options_made));
  const Owned<OrtSessionOptions> options(options_made, ort->ReleaseSessionOptions);
  void* library = nullptr;  // stays loaded as long as the process
  check(ort->RegisterCustomOpsLibrary(options.get(), kernels, &library));
  OrtSession* session_made = nullptr;
  check(ort->CreateSession(env.get(), model, options.get(), &session_made));
  const Owned<OrtSession> session(session_made, ort->ReleaseSession);

  OrtAllocator* allocator = nullptr;  // the session's own, which stays
  check(ort->GetAllocatorWithDefaultOptions(&allocator));
  const std::vector<Input> given = inputs_of(session.get(), allocator);
  const Input& frame_input = only(given, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4, "a frame [N,C,H,W] float");
  const Input& mask_input = only(given, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 3, "a mask [N,H,W] bool");
  if (given.size() != 2) throw std::runtime_error("expected a model of a frame and a mask, got more inputs");
  char* output_made = nullptr;
  check(ort->SessionGetOutputName(session.get(), 0, allocator, &output_made));
  const std::string output_name = taken(allocator, output_made);
  const std::vector<int64_t>& shape = frame_input.shape;
  const int64_t n = shape[0], height = shape[2], width = shape[3];
  if (mask_input.shape != std::vector<int64_t>{n, height, width})
    throw std::runtime_error(mask_input.name + ": expected a mask of the frame's size");
  std::vector<float> x(n * shape[1] * height * width);
  uint32_t state = 1;
  for (float& value : x) value = ((state = state * 1664525u + 1013904223u) >> 8) / 16777216.0f;
  std::vector<uint8_t> mask(n * height * width);
  for (int64_t k = 0; k < n; ++k)
    for (int64_t row = height / 4; row < height / 2; ++row)
      for (int64_t column = width / 4; column < width / 2; ++column) mask[(k * height + row) * width + column] = 1;

  OrtMemoryInfo* memory_made = nullptr;
  check(ort->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory_made));
  const Owned<OrtMemoryInfo> memory(memory_made, ort->ReleaseMemoryInfo);
  const auto frame = tensor(memory.get(), x, shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  const auto active = tensor(memory.get(), mask, {n, height, width}, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL);
  const char* const input_names[] = {frame_input.name.c_str(), mask_input.name.c_str()};
  const char* const output_names[] = {output_name.c_str()};
  const OrtValue* const inputs[] = {frame.get(), active.get()};

  for (int call = 0; call < 3; ++call) {  // the first one also allocates
    OrtValue* made = nullptr;
    const auto before = std::chrono::steady_clock::now();
    check(ort->Run(session.get(), nullptr, input_names, inputs, 2, output_names, 1, &made));
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - before;
    const Owned<OrtValue> y(made, ort->ReleaseValue);
    OrtTensorTypeAndShapeInfo* info_made = nullptr;
    check(ort->GetTensorTypeAndShape(y.get(), &info_made));
    const Owned<OrtTensorTypeAndShapeInfo> info(info_made, ort->ReleaseTensorTypeAndShapeInfo);
    size_t elements = 0;
    check(ort->GetTensorShapeElementCount(info.get(), &elements));
    void* data = nullptr;
    check(ort->GetTensorMutableData(y.get(), &data));
    std::printf("%s:", output_name.c_str());
    for (const int64_t side : shape_of(info.get())) std::printf(" %lld", static_cast<long long>(side));
    std::printf(" in %.2f ms\n", passed.count());
    if (output && call == 2) {
      std::ofstream file(output, std::ios::binary);
      file.write(static_cast<const char*>(data), static_cast<std::streamsize>(elements * sizeof(float)));
      if (!file.flush()) throw std::runtime_error(std::string(output) + ": cannot be written");
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3 && count != 4) {
    std::fprintf(stderr, "usage: masked MODEL LIBSBNET [OUTPUT]\n");
    return 2;
  }
  try {
    ort = OrtGetApiBase()->GetApi(18);  // of ONNX Runtime 1.18 and everything newer
    if (!ort) throw std::runtime_error("expected ONNX Runtime 1.18 or newer");
    run(arguments[1], arguments[2], count == 4 ? arguments[3] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "masked: %s\n", error.what());
    return 1;
  }
  return 0;
}
