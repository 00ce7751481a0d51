// Block copies for AVX-512 (-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c).
#if defined(__x86_64__)
#if !defined(__AVX512BW__)
#error "compile blocks_avx512.cpp with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c"
#endif
#define SBNET_ISA blocks_avx512
#define SBNET_VECTOR 64
#include "cpu/masked/gather_scatter_move.h"

namespace sbnet {
const BlockMoveFunction kBlockMoveAvx512 = blocks_avx512::move_blocks_of;
}  // namespace sbnet
#endif
