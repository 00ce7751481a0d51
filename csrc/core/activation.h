// The activations that an epilogue may apply to its sums.
#pragma once
#include <cstdint>

namespace sbnet {

enum class Activation : int32_t { kNone, kRelu, kRelu6, kLeakyRelu, kSilu, kGelu, kHardswish };

}  // namespace sbnet
