// yuv_to_rgb on the CPU: pixel by pixel. Pictures of hardware decoders lie on a GPU; this is for those on a CPU, and
// for comparison.
#include "core/frames/yuv_to_rgb.h"

#include "cpu/lists/mask.h"

namespace sbnet {
namespace {

template <class T>
T unit_of(int level) {
  return from_float<T>(static_cast<float>(level) / 255.0f);
}
template <>
uint8_t unit_of<uint8_t>(int level) {
  return static_cast<uint8_t>(level);
}

template <class T>
void convert_row(const YuvToRgbParams& p, int64_t n, int64_t y) {
  const uint8_t* image = p.planes + n * (p.height / 2 * 3) * p.width;
  T* to = static_cast<T*>(p.rgb.data) + (n * p.rgb.size[2] + y) * p.rgb.size[3] * 3;
  for (int64_t x = 0; x < p.rgb.size[3]; ++x) {
    int64_t row, column;
    shown_at(p, y, x, &row, &column);
    const YuvPlace at = yuv_place(p, row, column);
    int rgb[3];
    rgb_of(p, image[at.y], image[at.u], image[at.v], rgb);
    for (int c = 0; c < 3; ++c) to[x * 3 + c] = unit_of<T>(rgb[c]);
  }
}

template <class T>
void convert(const YuvToRgbParams& p, const Parallel& parallel) {
  const int64_t rows = p.rgb.size[2];
  parallel_for(parallel, p.images * rows, 1 + 4096 / (p.rgb.size[3] + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) convert_row<T>(p, r / rows, r % rows);
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_yuv_to_rgb_cpu(const sbnet::YuvToRgbParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const YuvToRgbParams& p = *params;
  SBNET_TRY(validate(p));
  if (p.rgb.dtype == DType::kU8)
    convert<uint8_t>(p, *parallel);
  else
    by_dtype<Half, BFloat16>(p.rgb.dtype, [&](auto t) { convert<decltype(t)>(p, *parallel); });
  return ok_status();
}
