// The convolution for AVX2, FMA and F16C (-mavx2 -mfma -mf16c): 16 registers of 8 floats.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile conv_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA conv_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#include "cpu/masked/conv_fma.h"

namespace sbnet {
const ConvKernels kConvKernelsAvx2 = {
    {SBNET_LANES, SBNET_VECTORS, 1, 4, 0}, conv_avx2::pack_all, conv_avx2::run_job, conv_avx2::pack_panel};
}  // namespace sbnet
#endif
