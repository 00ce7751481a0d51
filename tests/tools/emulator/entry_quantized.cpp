// What test_emulator_int8.py calls.
#include "conv_case.h"
#include "core/masked/conv_select.h"

namespace sbnet {

int32_t select_capability(const DeviceInfo&) { return 0; }  // cuda/capability.cu's, for every GPU's kernels

}  // namespace sbnet

extern "C" {

// Returns 0, or 1 where the tensor-core kernel does not take it and the portable one ran, or 2 and what went wrong.
// Where x is of floats, 0 says that it was rounded first.
__attribute__((visibility("default"))) int emulate_conv_quantized(const QuantizedCase* given, char* message,
                                                                  int64_t room) {
  using namespace sbnet;
  const QuantizedConv2dParams p = given->params();
  given->conv.device();
  const int64_t bytes = sbnet_sparse_conv2d_quantized_workspace_bytes_cuda(&p);
  std::vector<uint8_t> workspace(bytes + 16, 0x7f);  // what was not rounded is large, or NaN
  void* const aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 15) / 16 * 16);
  const int failed = told(sbnet_sparse_conv2d_quantized_cuda(&p, aligned, nullptr), message, room);
  return failed ? failed : bytes == 0 && select_bytes(p, 80).kernel == BytesKernel::kPortable;
}
}
