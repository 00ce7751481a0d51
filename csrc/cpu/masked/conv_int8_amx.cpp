// The convolution of int8 with AMX matrix registers: 64 input channels a product, exact sums in int32. Compiled like
// conv_avx512.cpp.
#if defined(SBNET_AMX)
#define SBNET_TILES
#define SBNET_ISA conv_int8_amx
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#include "cpu/masked/conv_int8_elements.h"
#include "cpu/masked/conv_tiles.h"

namespace sbnet {
namespace SBNET_ISA {

template <class T>
struct PanelFinish {
  using Sum = int32_t;
  Scales scales;
  PanelFinish(const ConvPlan& plan, int64_t k0, int64_t channels) { load_scales(plan, nullptr, k0, channels, &scales); }
  void operator()(const ConvPlan& plan, const ConvPixels& px, int64_t begin, int64_t end, int64_t k0, int64_t channels,
                  const int32_t* sums) const {
    const auto finish_pixels =
        plan.p.y.dtype == DType::kI8 ? finish_quantized<int8_t, int32_t> : finish_quantized<float, int32_t>;
    finish_pixels(plan, scales, px, begin, end, k0, channels, sums);
  }
};

}  // namespace SBNET_ISA
}  // namespace sbnet

#include "cpu/masked/conv_int8_table.h"

namespace sbnet {
const ConvKernels kConvInt8KernelsAmx = {
    {SBNET_LANES, SBNET_VECTORS, conv_int8_amx::kDepth, 1, conv_int8_amx::kTileRows},
    conv_int8_amx::pack_all,
    conv_int8_amx::run_job,
    nullptr};
}  // namespace sbnet
#endif
