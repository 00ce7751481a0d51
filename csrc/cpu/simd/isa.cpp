// Names the instruction set in use, for `sbnet info` and tests.
#include "cpu/simd/isa.h"

#include "core/status.h"

extern "C" SBNET_EXPORT const char* sbnet_cpu_isa() {
  switch (sbnet::chosen_isa()) {
    case sbnet::Isa::kAmxFp16:
      return "amx-fp16";
    case sbnet::Isa::kAmx:
      return "amx";
    case sbnet::Isa::kAvx512:
      return "avx512";
    case sbnet::Isa::kAvx2:
      return "avx2";
    default:
      return "generic";
  }
}
