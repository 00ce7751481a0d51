// Sums, maxima and moments for AVX2 and F16C (-mavx2 -mfma -mf16c). Wider vectors would wait for the same memory.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile block_fold_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA block_fold_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 4
#include "cpu/masked/block_fold_kernel.h"

namespace sbnet {
const FoldRect kFoldRectAvx2 = block_fold_avx2::fold_rect;
}  // namespace sbnet
#endif
