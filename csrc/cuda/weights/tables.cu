// A layout's tables in device memory that no framework owns: ONNX Runtime's kernels make them once a session.
#include "core/weights/matmul.h"
#include "cuda/common.cuh"

extern "C" {

sbnet::Status sbnet_block_layout_upload_cuda(const int32_t* words, int64_t count, int32_t** device) {
  constexpr const char* op = "block_layout";
  const size_t bytes = static_cast<size_t>(count) * sizeof(int32_t);
  SBNET_CUDA_TRY(op, cudaMalloc(reinterpret_cast<void**>(device), bytes));
  SBNET_CUDA_TRY(op, cudaMemcpy(*device, words, bytes, cudaMemcpyHostToDevice));
  return sbnet::ok_status();
}

void sbnet_block_layout_free_cuda(int32_t* device) {
  if (device) cudaFree(device);
}
}
