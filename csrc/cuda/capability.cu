#include <cstdlib>
#include <cstring>

#include "cuda/capability.h"

namespace sbnet {

namespace {

bool portable_only() {
  static const bool portable = [] {
    const char* value = std::getenv("SBNET_GPU");
    return value && !std::strcmp(value, "portable");
  }();
  return portable;
}

}  // namespace

int32_t select_capability([[maybe_unused]] const DeviceInfo& device) {
#ifdef SBNET_SM90
  return portable_only() ? 0 : device.capability;
#else
  return 0;
#endif
}

bool has_clusters(const DeviceInfo& device) { return device.capability >= 90 && !portable_only(); }

}  // namespace sbnet
