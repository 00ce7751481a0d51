// The convolution for AVX-512 (-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c): 32 registers of 16 floats.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512VL__) || !defined(__F16C__)
#error "compile conv_avx512.cpp with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c"
#endif
#define SBNET_ISA conv_avx512
#define SBNET_LANES 16
#define SBNET_VECTORS 4
#include "cpu/masked/conv_fma.h"

namespace sbnet {
const ConvKernels kConvKernelsAvx512 = {
    {SBNET_LANES, SBNET_VECTORS, 1, 4, 0}, conv_avx512::pack_all, conv_avx512::run_job, conv_avx512::pack_panel};
}  // namespace sbnet
#endif
