// The instruction-set dependent half of the convolution's weight gradient on the CPU.
#pragma once
#include "core/masked/conv_grad.h"

namespace sbnet {

// Pixels of blocks are packed and summed some tiles at a time, which stay in the cache: so many pixels, so many floats
// of x.
constexpr int64_t kGradTileWidth = 32, kGradTilePixels = 256, kGradPatchFloats = 1 << 16;
// Channels of a task. Sums have whole vectors of output channels.
constexpr int64_t kGradInputs = 48, kGradOutputs = 128, kGradLanes = 16;

// Some blocks of the list, for some channels.
struct ConvGradTask {
  const ConvWeightGradParams* p;
  int64_t begin, end;               // slots of the list
  int64_t input, inputs;            // input channels of x: the first, how many; not used by depthwise layers
  int64_t output, outputs;          // output channels
  int64_t tile_height, tile_width;  // of the output plane
  int64_t patch_height, patch_width;
  int64_t most_tiles;  // that are summed together
  float* sums;         // [taps][inputs, or 1 where depthwise][outputs in whole vectors]: zeroed, then added to
  float* bias;         // [outputs in whole vectors], or null
  float* scratch;      // grad_scratch() floats
};

static inline bool is_lanewise(const ConvWeightGradParams& p) { return is_depthwise(p.conv.weight, p.conv.groups); }
static inline int64_t whole_lanes(int64_t channels) { return (channels + kGradLanes - 1) / kGradLanes * kGradLanes; }

using ConvGradFunction = void (*)(const ConvGradTask& task);
extern const ConvGradFunction kConvGradGeneric;
#if defined(__x86_64__)
extern const ConvGradFunction kConvGradAvx2;
extern const ConvGradFunction kConvGradAvx512;
#endif

}  // namespace sbnet
