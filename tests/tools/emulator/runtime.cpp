// The few functions of the CUDA runtime that launches want.
#include "machine.h"

extern "C" {

// The Hopper kernels are told their device; the others ask, and get one of capability 8.0.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? emulator::multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? 8
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 99 * 1024
                                                            : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = emulator::multiprocessors;  // launches remember what they asked a device
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
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
