// motion_mask for AVX2 (-mavx2 -mfma -mf16c). Wider vectors would wait for the same memory.
#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "compile motion_mask_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA motion_mask_avx2
#include "cpu/lists/motion_mask_kernel.h"

namespace sbnet {
const MotionKernels kMotionAvx2 = motion_mask_avx2::kMotionKernels;
}  // namespace sbnet
#endif
