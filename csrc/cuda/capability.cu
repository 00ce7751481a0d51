#include <cstdlib>
#include <cstring>

#include "cuda/capability.h"

namespace sbnet {

int32_t select_capability([[maybe_unused]] const DeviceInfo& device) {
#ifdef SBNET_SM90
  static const bool portable = [] {
    const char* value = std::getenv("SBNET_GPU");
    return value && !std::strcmp(value, "portable");
  }();
  return portable ? 0 : device.capability;
#else
  return 0;
#endif
}

}  // namespace sbnet
