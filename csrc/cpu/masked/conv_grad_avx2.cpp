// The convolution's weight gradient for AVX2 (-mavx2 -mfma -mf16c): 16 registers of 8 floats.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile conv_grad_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA conv_grad_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#include "cpu/masked/conv_grad_kernel.h"

namespace sbnet {
const ConvGradFunction kConvGradAvx2 = conv_grad_avx2::run_task;
}  // namespace sbnet
#endif
