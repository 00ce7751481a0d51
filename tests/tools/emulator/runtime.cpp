// The few functions of the CUDA runtime that launches want.
#include "machine.h"

extern "C" {

cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNotSupported; }
cudaError_t cudaGetDevice(int*) { return cudaErrorNotSupported; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulator::failure.c_str() : "refused by the emulator";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(emulator::encode);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
