// The convolution of int8 for AVX2 (-mavx2 -mfma -mf16c).
#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "compile conv_int8_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA conv_int8_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#include "cpu/masked/conv_int8.h"

namespace sbnet {
const ConvKernels kConvInt8KernelsAvx2 = {
    {SBNET_LANES, SBNET_VECTORS, conv_int8_avx2::kDepth, sizeof(conv_int8_avx2::Element), 0},
    conv_int8_avx2::pack_all,
    conv_int8_avx2::run_job,
    nullptr};
}  // namespace sbnet
#endif
