// The activations that an epilogue may apply to its sums. kPrelu takes a slope a channel: of convolutions alone.
#pragma once
#include <cstdint>

namespace sbnet {

enum class Activation : int32_t { kNone, kRelu, kRelu6, kLeakyRelu, kSilu, kGelu, kHardswish, kPrelu };

}  // namespace sbnet
