// The part of ONNX Runtime's C API that main.cpp calls, for machines that have the library and not its headers (no
// pip or npm package ships them). Slots of OrtApi never move.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtMemoryInfo;
struct OrtValue;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtAllocator;

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType { ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9 };

struct OrtApi {
  void* slots_0_1[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char* name, OrtEnv**);
  void* slots_4_6[3];
  OrtStatus* (*CreateSession)(const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession**);
  void* slot_8;
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs,
                    size_t input_count, const char* const* output_names, size_t output_count, OrtValue** outputs);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
  void* slots_11_28[18];
  OrtStatus* (*RegisterCustomOpsLibrary)(OrtSessionOptions*, const char* path, void** handle);
  OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t*);
  void* slots_31_32[2];
  OrtStatus* (*SessionGetInputTypeInfo)(const OrtSession*, size_t index, OrtTypeInfo**);
  void* slots_34_35[2];
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t index, OrtAllocator*, char** name);
  OrtStatus* (*SessionGetOutputName)(const OrtSession*, size_t index, OrtAllocator*, char** name);
  void* slots_38_48[11];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* shape,
                                               size_t rank, ONNXTensorElementDataType, OrtValue**);
  void* slot_50;
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  void* slots_52_54[3];
  OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**);
  void* slots_56_59[4];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t count);
  void* slot_63;
  OrtStatus* (*GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  void* slots_66_68[3];
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  void* slots_70_75[6];
  OrtStatus* (*AllocatorFree)(OrtAllocator*, void*);
  void* slot_77;
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  void* slots_79_91[13];
  void (*ReleaseEnv)(OrtEnv*);
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void* slot_97;
  void (*ReleaseTypeInfo)(OrtTypeInfo*);
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
const OrtApiBase* OrtGetApiBase();
}
