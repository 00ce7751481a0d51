// Copies of the tensors that a call of a planned network was given, to where its CUDA graph reads them: one launch.
#pragma once
#include "core/types.h"

namespace sbnet {

constexpr int kMostCopies = 8;  // of a launch; more take several

struct CopiesParams {
  void* to[kMostCopies];
  const void* from[kMostCopies];
  int64_t bytes[kMostCopies];  // of each, at any address; to and from are apart
  bool address[kMostCopies];   // the address `from` itself is what is written: 8 bytes, aligned
  int32_t count;
};

}  // namespace sbnet

extern "C" {
SBNET_EXPORT sbnet::Status sbnet_copies_cuda(const sbnet::CopiesParams* p, void* stream);
}
