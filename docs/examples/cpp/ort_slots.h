// Where main.cpp's calls stand in OrtApi: holds ort_c_api.h, or the official header, to it when the program is
// compiled.
#pragma once
#define ORT_SLOT(name, slot) static_assert(offsetof(OrtApi, name) == (slot) * sizeof(void*), #name)
ORT_SLOT(GetErrorMessage, 2);
ORT_SLOT(CreateEnv, 3);
ORT_SLOT(CreateSession, 7);
ORT_SLOT(Run, 9);
ORT_SLOT(CreateSessionOptions, 10);
ORT_SLOT(RegisterCustomOpsLibrary, 29);
ORT_SLOT(SessionGetInputTypeInfo, 33);
ORT_SLOT(CreateTensorWithDataAsOrtValue, 49);
ORT_SLOT(GetTensorMutableData, 51);
ORT_SLOT(CastTypeInfoToTensorInfo, 55);
ORT_SLOT(GetDimensionsCount, 61);
ORT_SLOT(GetDimensions, 62);
ORT_SLOT(GetTensorShapeElementCount, 64);
ORT_SLOT(GetTensorTypeAndShape, 65);
ORT_SLOT(CreateCpuMemoryInfo, 69);
ORT_SLOT(ReleaseEnv, 92);
ORT_SLOT(ReleaseStatus, 93);
ORT_SLOT(ReleaseMemoryInfo, 94);
ORT_SLOT(ReleaseSession, 95);
ORT_SLOT(ReleaseValue, 96);
ORT_SLOT(ReleaseTypeInfo, 98);
ORT_SLOT(ReleaseTensorTypeAndShapeInfo, 99);
ORT_SLOT(ReleaseSessionOptions, 100);
#undef ORT_SLOT
