// What this library was built with: "version=...;cuda=...;archs=...", for `sbnet info`.
#include "core/status.h"

#ifndef SBNET_CUDA_ARCHS
#define SBNET_CUDA_ARCHS ""
#define SBNET_CUDA_VERSION ""
#endif

extern "C" SBNET_EXPORT const char* sbnet_build_info() {
  return "version=" SBNET_VERSION ";compiler=" __VERSION__ ";cuda=" SBNET_CUDA_VERSION ";archs=" SBNET_CUDA_ARCHS;
}
