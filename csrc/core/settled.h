// What a launch may take for granted about its stream.
#pragma once
#include "core/types.h"

namespace sbnet {

// Has the caller said that the inputs of this thread's launches, but for feature maps, are settled: that weights, lists
// and counts were complete before the launch ahead of the next one began to let it start? Then kernels read those
// before the launch ahead has ended.
SBNET_EXPORT bool inputs_settled();

}  // namespace sbnet

extern "C" {
// Says so for the launches that follow on this thread, or takes it back. To be said after a launch that waits for what
// wrote them, and releases the next one only then, as every layer of sbnet's does.
SBNET_EXPORT void sbnet_settle_inputs(int32_t settled);
}

namespace sbnet {

// While this lives they are not: of launches that read, as weights, what the launch ahead of them writes.
class Unsettled {
 public:
  Unsettled() { sbnet_settle_inputs(false); }
  ~Unsettled() { sbnet_settle_inputs(before_); }
  Unsettled(const Unsettled&) = delete;
  Unsettled& operator=(const Unsettled&) = delete;

 private:
  bool before_ = inputs_settled();
};

}  // namespace sbnet
