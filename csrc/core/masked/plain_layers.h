// The ops on active blocks that say what they are, which both bindings make of it: schemas, attributes, sizes.
#pragma once
#include "core/masked/conv_layers.h"
#include "core/masked/norm.h"
#include "core/masked/pointwise.h"
#include "core/masked/pool.h"
#include "core/masked/rearrange.h"
#include "core/masked/resize.h"

namespace sbnet {

template <class... L>
struct LayerList {};

using PlainLayers =
    LayerList<MaxPoolLayer, AveragePoolLayer, RearrangeLayer, ResizeLayer, PointwiseLayer, NormLayer, Conv2dLayer,
              QuantizedConv2dLayer, DequantizedConv2dLayer, ConvTransposeLayer, BottleneckLayer>;

}  // namespace sbnet
