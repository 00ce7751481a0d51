// What test_emulator_int8.py calls.
#include "conv_case.h"
#include "core/masked/conv_select.h"

extern "C" {

// Returns 0, or 1 where the tensor-core kernel does not take it and the portable one ran, or 2 and what went wrong.
__attribute__((visibility("default"))) int emulate_conv_quantized(const QuantizedCase* given, char* message,
                                                                  int64_t room) {
  using namespace sbnet;
  const QuantizedConv2dParams p = given->params();
  given->conv.device();
  const int failed = told(sbnet_sparse_conv2d_quantized_cuda(&p, nullptr, nullptr), message, room);
  return failed ? failed : int8_mma_declines(p) != nullptr;
}
}
