// The ops on active blocks that read x and numbers alone. Both bindings make an op of each: schemas, attributes, sizes.
#pragma once
#include "core/masked/pool.h"
#include "core/masked/rearrange.h"

namespace sbnet {

template <class... L>
struct LayerList {};

using PlainLayers = LayerList<MaxPoolLayer, AveragePoolLayer, RearrangeLayer>;

}  // namespace sbnet
