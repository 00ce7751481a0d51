// Which instruction set CPU kernels run with: chosen once, at the first call, from what the processor and the
// operating system support. The environment variable SBNET_ISA=generic|avx2|avx512|amx lowers the choice (tests run
// every path on one machine); a set that the machine lacks is never chosen.
//
// A file compiled for a higher set must not define anything with external linkage that baseline code may also define
// (inline functions, templates of std): the linker keeps one copy, perhaps the one that faults on an older processor.
// Kernel headers therefore live in a namespace named after the set, and use builtins instead of std templates.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sbnet {

enum class Isa { kGeneric, kAvx2, kAvx512, kAmx, kAmxFp16 };  // kAmx multiplies bfloat16 and int8, kAmxFp16 float16 too

#if defined(__x86_64__)
// Above AVX-512: the matrix registers, which a process must ask the kernel for (before Linux 5.16: never granted).
inline Isa detect_amx() {
#if defined(SBNET_EMULATE_AMX)
  return Isa::kAmxFp16;
#endif
  constexpr unsigned kInt8 = 1u << 25, kTiles = 1u << 24, kBf16 = 1u << 22, kAll = kInt8 | kTiles | kBf16;
  constexpr unsigned kFp16 = 1u << 21;  // of another leaf
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return Isa::kAvx512;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return Isa::kAvx512;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kFp16) ? Isa::kAmxFp16 : Isa::kAmx;
}
#endif

inline Isa detect_isa() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kGeneric;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return detect_amx();
  return Isa::kAvx2;
#else
  return Isa::kGeneric;
#endif
}

// Dot products of bytes, beside AVX-512.
inline bool has_vnni() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Dot products of bfloat16, beside AVX-512.
inline bool has_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

inline Isa chosen_isa() {
  static const Isa isa = [] {
    const Isa best = detect_isa();
    const char* wish = std::getenv("SBNET_ISA");
    if (!wish) return best;
    const std::pair<const char*, Isa> names[] = {
        {"generic", Isa::kGeneric}, {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512}, {"amx", Isa::kAmxFp16}};
    for (const auto& [name, isa] : names)
      if (!std::strcmp(wish, name)) return std::min(isa, best);
    return best;
  }();
  return isa;
}

}  // namespace sbnet

// Of two kernels that are compiled for a set, Avx2 or Avx512, and for any processor: SBNET_FROM(Avx2, kPoolRow) is
// kPoolRowAvx2 or kPoolRowGeneric.
#if defined(__x86_64__)
#define SBNET_FROM(set, kernel) \
  (::sbnet::chosen_isa() >= ::sbnet::Isa::k##set ? ::sbnet::kernel##set : ::sbnet::kernel##Generic)
#else
#define SBNET_FROM(set, kernel) ::sbnet::kernel##Generic
#endif
