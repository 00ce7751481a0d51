// Tensors of a CUDA graph that each replay may find elsewhere: a call's frame and mask, which kernels read where they
// lie instead of a copy.
#pragma once
#include "core/types.h"

namespace sbnet {

constexpr int kMostThrough = 8;  // tensors of a thread

// The device memory that will hold the address of what this thread's next launch is told lies at `data`; null: it lies
// there. A launch that can read so asks once, and reads the address after its grid dependency wait.
SBNET_EXPORT const void* const* lies_at(const void* data);

}  // namespace sbnet

extern "C" {
// Launches of this thread that are told of a tensor at `data` are to find its address in `address`, device memory, if
// they can; null: they are no longer. False: there are kMostThrough of them.
SBNET_EXPORT bool sbnet_read_through(const void* data, const void* address);
// How many launches do since.
SBNET_EXPORT int64_t sbnet_reads_through(const void* data);
}
