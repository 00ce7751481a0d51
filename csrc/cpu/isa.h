// Which instruction set CPU kernels run with: chosen once, at the first call, from what the processor and the
// operating system support. The environment variable SBNET_ISA=generic|avx2|avx512 lowers the choice (tests run every
// path on one machine); a set that the machine lacks is never chosen.
//
// A file compiled for a higher set must not define anything with external linkage that baseline code may also define
// (inline functions, templates of std): the linker keeps one copy, perhaps the one that faults on an older processor.
// Kernel headers therefore live in a namespace named after the set, and use builtins instead of std templates.
#pragma once
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace sbnet {

enum class Isa { kGeneric, kAvx2, kAvx512 };

inline Isa detect_isa() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kGeneric;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  return Isa::kAvx2;
#else
  return Isa::kGeneric;
#endif
}

inline Isa chosen_isa() {
  static const Isa isa = [] {
    const Isa best = detect_isa();
    const char* wish = std::getenv("SBNET_ISA");
    if (!wish) return best;
    if (!std::strcmp(wish, "generic")) return Isa::kGeneric;
    if (!std::strcmp(wish, "avx2") && best >= Isa::kAvx2) return Isa::kAvx2;
    return best;
  }();
  return isa;
}

}  // namespace sbnet
