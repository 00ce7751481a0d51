// A depthwise convolution with the 1x1 convolution that alone is read by it before it, the one that alone reads it
// behind it, or both, as the residual blocks of mobile networks have them:
//   hidden = A(x), hidden = depthwise(hidden), y = C(hidden)
// On a CPU their tiles follow each other, so that hidden pixels, of which there are many times as many bytes as of x
// and y, never leave the cache. The results are bitwise those of the layers one after the other.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

constexpr int kMostChained = 3;

struct ConvChainParams {
  int32_t count;  // 2 or 3 layers
  // In order, each valid by itself, its weights packed. What one writes is the next one's x, with no other consumer: y
  // of all but the last may be written or not, and its fringe, outside which pixels of inactive blocks are not read, or
  // not.
  Conv2dParams layers[kMostChained];
};

}  // namespace sbnet

extern "C" {
// Layers that a CPU can run so: float32, channels innermost, without groups but the depthwise one's, whose channels are
// whole vectors.
SBNET_EXPORT bool sbnet_conv_chain_suits_cpu(const sbnet::ConvChainParams* p);
SBNET_EXPORT int64_t sbnet_conv_chain_workspace_bytes_cpu(const sbnet::ConvChainParams* p, int32_t threads);
// Where hidden pixels fit the cache anyway, it runs the layers one after the other.
SBNET_EXPORT sbnet::Status sbnet_conv_chain_cpu(const sbnet::ConvChainParams* p, void* workspace,
                                                const sbnet::Parallel* parallel);
}
