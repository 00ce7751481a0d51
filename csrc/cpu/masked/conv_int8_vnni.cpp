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

namespace sbnet {
const ConvKernels kConvInt8KernelsVnni = {
    {SBNET_LANES, SBNET_VECTORS, conv_int8_vnni::kDepth, sizeof(conv_int8_vnni::Element), 0},
    conv_int8_vnni::pack_all,
    conv_int8_vnni::run_job,
    nullptr};
}  // namespace sbnet
#endif
