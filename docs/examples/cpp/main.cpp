// Runs a masked network in ONNX Runtime, without Python and PyTorch:
//
//   masked MODEL LIBSBNET [OUTPUT]
//
// MODEL takes x [N,C,H,W] float and mask [N,H,W] bool and gives y float, as `sbnet export` writes it. The frame is
// noise, the mask a rectangle; OUTPUT receives y as raw floats.
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

std::vector<int64_t> input_shape(const OrtSession* session) {
  OrtTypeInfo* made = nullptr;
  check(ort->SessionGetInputTypeInfo(session, 0, &made));
  const Owned<OrtTypeInfo> type(made, ort->ReleaseTypeInfo);
  const OrtTensorTypeAndShapeInfo* info = nullptr;  // belongs to the type
  check(ort->CastTypeInfoToTensorInfo(type.get(), &info));
  if (!info) throw std::runtime_error("x: expected a tensor");
  std::vector<int64_t> shape = shape_of(info);
  if (shape.size() != 4) throw std::runtime_error("x: expected 4 dimensions");
  for (const int64_t side : shape)
    if (side <= 0) throw std::runtime_error("x: expected a model of fixed shapes");
  return shape;
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

  const std::vector<int64_t> shape = input_shape(session.get());
  const int64_t n = shape[0], height = shape[2], width = shape[3];
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
  const char* const input_names[] = {"x", "mask"};
  const char* const output_names[] = {"y"};
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
    std::printf("y:");
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
