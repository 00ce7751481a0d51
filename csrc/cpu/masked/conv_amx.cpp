// The convolution of float16 and bfloat16 with AMX matrix registers: 16 pixels x 16 output channels x 32 input channels
// a product, sums in float32. Compiled like conv_avx512.cpp.
#if defined(SBNET_AMX)
#define SBNET_ISA conv_amx
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#include "cpu/simd/tiles.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kDepth = 32;
constexpr int kZeroByte = 0;

template <class T>
using Stored = T;  // no arithmetic but in the matrix registers

template <class T>
SBNET_INLINE void put(T* to, T from, float) {
  *to = from;
}
template <class T>
SBNET_INLINE void put_row(T* to, const T* from, int64_t count, float) {
  __builtin_memcpy(to, from, count * sizeof(T));
}

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_tiles.h"

namespace sbnet {
namespace SBNET_ISA {

// Bias, activation and residual of a panel.
template <class T>
struct PanelFinish {
  using Sum = float;
  PanelEnd end;
  PanelFinish(const ConvPlan& plan, int64_t k0, int64_t channels) { load_end<T>(plan.p, k0, channels, &end); }
  void operator()(const ConvPlan& plan, const ConvPixels& px, int64_t begin, int64_t until, int64_t k0,
                  int64_t channels, const float* sums) const {
    finish<T>(plan, px, begin, until, k0, channels, end, sums);
  }
};

static void run_amx_job(const ConvPlan& plan, const ConvJob& job) {
  if (plan.p.x.dtype == DType::kF16)
    run<Half>(plan, job);
  else
    run<BFloat>(plan, job);
}

static void pack_all(const ConvLayout& layout, void* packed, int64_t begin, int64_t end) {
  if (layout.weight.dtype == DType::kF16)
    pack_weights<Half>(layout, packed, begin, end);
  else
    pack_weights<BFloat>(layout, packed, begin, end);
}

}  // namespace SBNET_ISA

const ConvKernels kConvKernelsAmx = {{SBNET_LANES, SBNET_VECTORS, conv_amx::kDepth, 2, conv_amx::kTileRows},
                                     conv_amx::pack_all,
                                     conv_amx::run_amx_job,
                                     nullptr};
}  // namespace sbnet
#endif
