// The taps of a 3x3 convolution of stride 2.
#pragma once
#include <stdint.h>

namespace sbnet::sm90 {

// The patch of a tile is four, one per parity of input row and column, in the order odd-odd (4 taps), odd-even (2),
// even-odd (2), even-even (1). Tap q of that order is tap kTapOrder[q] of the kernel.
constexpr uint64_t kTapOrder = 0x453718620;
constexpr uint32_t kRightTaps = 0x8A, kLowerTaps = 0x2C;  // bit q: one pixel right of, below its patch's origin
constexpr uint32_t kNarrowTaps = 0x130;                   // of patches of even columns, 8 pixels wide, not 9
constexpr uint32_t kLastTaps = 0x1A8;                     // bit q: its patch's last
constexpr uint32_t kFirstTaps = 0x8640;                   // nibble p: patch p's first

}  // namespace sbnet::sm90
