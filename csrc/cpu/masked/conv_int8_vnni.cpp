// The convolution of int8 for AVX-512 with VNNI (conv_avx512.cpp's flags and -mavx512vnni).
#if defined(__x86_64__)
#if !defined(__AVX512VNNI__)
#error "compile conv_int8_vnni.cpp with AVX-512 and -mavx512vnni"
#endif
#define SBNET_VNNI
#define SBNET_ISA conv_int8_vnni
#define SBNET_LANES 16
#define SBNET_VECTORS 4
#include "cpu/masked/conv_int8.h"

const sbnet::ConvKernels sbnet::kConvInt8KernelsVnni = sbnet::conv_int8_vnni::kTable;
#endif
