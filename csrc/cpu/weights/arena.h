// Parts of a workspace.
#pragma once
#include <cstdint>

namespace sbnet {

// Hands out parts of a workspace, each from a cache line's beginning on; without one it counts the bytes.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    char* at = base ? base + used : nullptr;
    used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
};

}  // namespace sbnet
