// The convolution's weight gradient for AVX-512 (-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c): 32 registers
// of 16 floats.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__F16C__)
#error "compile conv_grad_avx512.cpp with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c"
#endif
#define SBNET_ISA conv_grad_avx512
#define SBNET_LANES 16
#define SBNET_VECTORS 4
#include "cpu/masked/conv_grad_kernel.h"

namespace sbnet {
const ConvGradFunction kConvGradAvx512 = conv_grad_avx512::run_task;
}  // namespace sbnet
#endif
