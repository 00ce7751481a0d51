// The convolution of int8 for AVX2 (-mavx2 -mfma -mf16c).
#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "compile conv_int8_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA conv_int8_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#include "cpu/masked/conv_int8.h"

const sbnet::ConvKernels sbnet::kConvInt8KernelsAvx2 = sbnet::conv_int8_avx2::kTable;
#endif
