// The part of ONNX Runtime's C ABI that sbnet uses, written down by hand: no onnxruntime package ships its headers.
// The ABI only grows, and GetApi(18) exists since ONNX Runtime 1.18, so slot numbers and structs here never change.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtStatus;
struct OrtValue;
struct OrtAllocator;
struct OrtMemoryInfo;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;

struct OrtApiBase {
  const void* const* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const void* api, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int32_t (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int32_t (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int32_t (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int32_t (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int32_t (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const void* api, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);  // stays null: it made ORT overwrite graph inputs
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};
}
static_assert(sizeof(OrtCustomOp) == 208, "the struct of version 18");

namespace sbnet::ort {

constexpr uint32_t kApiVersion = 18;

enum ErrorCode : int32_t { kInvalidArgument = 2, kNotImplemented = 9 };
enum ElementType : int32_t {
  kFloat = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kDouble = 11,
  kBFloat16 = 16,
  kFloat8 = 17  // e4m3fn
};
enum Characteristic : int32_t { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum MemoryType : int32_t { kDefaultMemory = 0, kCpuInput = -2 };
enum AttributeType : int32_t { kInt = 1, kInts = 2, kReal = 3, kString = 5 };

// name, slot, result, arguments
#define SBNET_ORT_API(F)                                                                                            \
  F(CreateStatus, 0, OrtStatus*, (int32_t code, const char* message))                                               \
  F(GetErrorMessage, 2, const char*, (const OrtStatus*))                                                            \
  F(CreateCustomOpDomain, 26, OrtStatus*, (const char* name, OrtCustomOpDomain**))                                  \
  F(CustomOpDomain_Add, 27, OrtStatus*, (OrtCustomOpDomain*, const OrtCustomOp*))                                   \
  F(AddCustomOpDomain, 28, OrtStatus*, (OrtSessionOptions*, OrtCustomOpDomain*))                                    \
  F(GetTensorMutableData, 51, OrtStatus*, (OrtValue*, void**))                                                      \
  F(CreateTensorTypeAndShapeInfo, 57, OrtStatus*, (OrtTensorTypeAndShapeInfo**))                                    \
  F(SetTensorElementType, 58, OrtStatus*, (OrtTensorTypeAndShapeInfo*, int32_t))                                    \
  F(SetDimensions, 59, OrtStatus*, (OrtTensorTypeAndShapeInfo*, const int64_t*, size_t count))                      \
  F(GetTensorElementType, 60, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, int32_t*))                             \
  F(GetDimensionsCount, 61, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, size_t*))                                \
  F(GetDimensions, 62, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, int64_t*, size_t count))                      \
  F(GetSymbolicDimensions, 63, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, const char**, size_t count))          \
  F(GetTensorTypeAndShape, 65, OrtStatus*, (const OrtValue*, OrtTensorTypeAndShapeInfo**))                          \
  F(AllocatorAlloc, 75, OrtStatus*, (OrtAllocator*, size_t bytes, void**))                                          \
  F(AllocatorFree, 76, OrtStatus*, (OrtAllocator*, void*))                                                          \
  F(KernelInfoGetAttribute_float, 85, OrtStatus*, (const OrtKernelInfo*, const char*, float*))                      \
  F(KernelInfoGetAttribute_int64, 86, OrtStatus*, (const OrtKernelInfo*, const char*, int64_t*))                    \
  F(KernelInfoGetAttribute_string, 87, OrtStatus*, (const OrtKernelInfo*, const char*, char*, size_t* size))        \
  F(KernelContext_GetInputCount, 88, OrtStatus*, (const OrtKernelContext*, size_t*))                                \
  F(KernelContext_GetOutputCount, 89, OrtStatus*, (const OrtKernelContext*, size_t*))                               \
  F(KernelContext_GetInput, 90, OrtStatus*, (const OrtKernelContext*, size_t index, const OrtValue**))              \
  F(KernelContext_GetOutput, 91, OrtStatus*,                                                                        \
    (OrtKernelContext*, size_t index, const int64_t* dimensions, size_t count, OrtValue**))                         \
  F(ReleaseStatus, 93, void, (OrtStatus*))                                                                          \
  F(ReleaseTensorTypeAndShapeInfo, 99, void, (OrtTensorTypeAndShapeInfo*))                                          \
  F(ReleaseAllocator, 132, void, (OrtAllocator*))                                                                   \
  F(KernelInfoGetAttributeArray_int64, 163, OrtStatus*, (const OrtKernelInfo*, const char*, int64_t*, size_t*))     \
  F(KernelContext_GetGPUComputeStream, 193, OrtStatus*, (const OrtKernelContext*, void**))                          \
  F(GetTensorMemoryInfo, 194, OrtStatus*, (const OrtValue*, const OrtMemoryInfo**))                                 \
  F(KernelInfoGetConstantInput_tensor, 249, OrtStatus*,                                                             \
    (const OrtKernelInfo*, size_t index, int* is_constant, const OrtValue**))                                       \
  F(KernelContext_GetAllocator, 253, OrtStatus*, (const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator**))   \
  F(ShapeInferContext_GetInputCount, 267, OrtStatus*, (const OrtShapeInferContext*, size_t*))                       \
  F(ShapeInferContext_GetInputTypeShape, 268, OrtStatus*,                                                           \
    (const OrtShapeInferContext*, size_t index, OrtTensorTypeAndShapeInfo**))                                       \
  F(ShapeInferContext_GetAttribute, 269, OrtStatus*, (const OrtShapeInferContext*, const char*, const OrtOpAttr**)) \
  F(ShapeInferContext_SetOutputTypeShape, 270, OrtStatus*,                                                          \
    (const OrtShapeInferContext*, size_t index, const OrtTensorTypeAndShapeInfo*))                                  \
  F(SetSymbolicDimensions, 271, OrtStatus*, (OrtTensorTypeAndShapeInfo*, const char**, size_t count))               \
  F(ReadOpAttr, 272, OrtStatus*, (const OrtOpAttr*, int32_t type, void*, size_t bytes, size_t* wanted))             \
  F(KernelContext_ParallelFor, 274, OrtStatus*,                                                                     \
    (const OrtKernelContext*, void (*)(void* arg, size_t index), size_t total, size_t batches, void* arg))          \
  F(KernelContext_GetScratchBuffer, 277, OrtStatus*,                                                                \
    (const OrtKernelContext*, const OrtMemoryInfo*, size_t bytes, void**))

struct Api {
#define SBNET_ORT_MEMBER(name, slot, result, arguments) result(*name) arguments;
  SBNET_ORT_API(SBNET_ORT_MEMBER)
#undef SBNET_ORT_MEMBER
};

inline Api load_api(const void* const* slots) {
  Api api;
#define SBNET_ORT_LOAD(name, slot, result, arguments) \
  api.name = reinterpret_cast<result(*) arguments>(const_cast<void*>(slots[slot]));
  SBNET_ORT_API(SBNET_ORT_LOAD)
#undef SBNET_ORT_LOAD
  return api;
}

}  // namespace sbnet::ort
