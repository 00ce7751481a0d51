// yuv_to_rgb: a decoder's planes become a network's input. Semantics: sbnet/reference/frames.py.
#pragma once
#include "core/kernels.h"

namespace sbnet {

struct YuvToRgbParams {
  const uint8_t* planes;          // [N, 3H/2, W]: luma, below it chroma for each 2x2 pixels
  int64_t images, height, width;  // of luma, both even
  // [N,3,h,w] out, channels last without gaps: uint8, 0 to 255, or floats, 0 to 1. What it has beyond the picture, on
  // the right and below, repeats the picture's border.
  TensorView rgb;
  // What levels are multiplied by, 13 bits of fraction: luma, V to red, U to blue, U to green, V to green.
  int32_t luma, red, blue, green_u, green_v;
  int32_t black;              // level of luma that is 0
  bool planar;                // all of U lies before all of V, not U and V in turn
  bool turned, over, across;  // the picture: transposed, then mirrored up and down, then left and right

  int64_t picture(int d) const { return (d == 0) == turned ? width : height; }
};

SBNET_EXPORT Status validate(const YuvToRgbParams& p);

// Red, green and blue, 0 to 255, as FFmpeg's swscale makes them on x86-64: it keeps the upper halves of 16-bit
// products.
SBNET_HOST_DEVICE inline void rgb_of(const YuvToRgbParams& p, int y, int u, int v, int (&rgb)[3]) {
  const auto clamped = [](int level) { return level < 0 ? 0 : level > 255 ? 255 : level; };
  const int light = (y - p.black) * p.luma >> 13;
  u -= 128, v -= 128;
  rgb[0] = clamped(light + (v * p.red >> 13));
  rgb[1] = clamped(light + (u * p.green_u >> 13) + (v * p.green_v >> 13));
  rgb[2] = clamped(light + (u * p.blue >> 13));
}

// Of an image: where luma's pixel of row and column lies, and its chroma.
struct YuvPlace {
  int64_t y, u, v;
};
SBNET_HOST_DEVICE inline YuvPlace yuv_place(const YuvToRgbParams& p, int64_t row, int64_t column) {
  const int64_t area = p.height * p.width, half = p.width / 2;
  const int64_t at = row / 2 * half + column / 2;
  return {row * p.width + column, area + (p.planar ? at : 2 * at), area + (p.planar ? at + area / 4 : 2 * at + 1)};
}

// The pixel of luma that the picture shows at (y, x), which are clamped to it.
SBNET_HOST_DEVICE inline void shown_at(const YuvToRgbParams& p, int64_t y, int64_t x, int64_t* row, int64_t* column) {
  const int64_t high = p.turned ? p.width : p.height, wide = p.turned ? p.height : p.width;
  y = y < high ? y : high - 1, x = x < wide ? x : wide - 1;
  y = p.over ? high - 1 - y : y, x = p.across ? wide - 1 - x : x;
  *row = p.turned ? x : y, *column = p.turned ? y : x;
}

}  // namespace sbnet

SBNET_DECLARE(yuv_to_rgb, YuvToRgbParams)
