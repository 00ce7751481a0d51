// Weights of convolutions in Winograd's form, a panel of output channels at a time (conv_winograd.h). Those of a
// dense layer have one run of input channels; block-sparse ones (cpu/weights/conv_winograd.cpp) one for each block.
#pragma once
#include <cstdint>

namespace sbnet {

constexpr int kWinogradPoints = 16;  // sums of a 2x2 square of outputs

// Of an axis of 2, 3, 5 or 7 taps: products of its points, for each pair of channels. 0 of others.
constexpr int64_t winograd_terms(int64_t taps) {
  return taps == 2 ? 3 : taps == 3 ? 4 : taps == 5 ? 7 : taps == 7 ? 10 : 0;
}

// Neighbouring input channels and their filters.
struct WinogradRun {
  int64_t first, count;
  const void* filters;  // of the panel's first output channel and the run's first input channel: the upper left tap
  int64_t stride[4];    // between output channels, input channels, rows and columns of taps, in elements
};

struct WinogradPanel {
  int64_t k0, channels;  // output channels
  int64_t width;         // floats of a row of weights: whole vectors
  const WinogradRun* runs;
  int64_t run_count, inputs;  // inputs: of all runs
  float* weights;             // [row term][column term][inputs][width]
};

}  // namespace sbnet
