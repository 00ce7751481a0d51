// Instructions that only the block-sparse products need, beside those of cuda/sm90/ptx.cuh: operands whose rows are the
// reduction, and weights from registers at any width.
#pragma once
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90::matmul {

__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t from, int c, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(from),
               "r"(c), "r"(row)
               : "memory");
}
__device__ __forceinline__ void multicast_pixels(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int x, int y,
                                                 int n, uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(x), "r"(y), "r"(n), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// The low half of an operand's descriptor (the high one is wgmma_layout(1024)). For operands whose rows are the
// reduction, 64 of their M or N to a row: next_64 bytes lie between 64 of them and the next 64.
__device__ __forceinline__ uint32_t operand(uint32_t address, uint32_t next_64 = 0) {
  return (address & 0x3FFFF) >> 4 | next_64 >> 4 << 16;
}

#define SBNET_F8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SBNET_F32(i) SBNET_F8(i), SBNET_F8(i + 8), SBNET_F8(i + 16), SBNET_F8(i + 24)
#define SBNET_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SBNET_R32                                                                                                  \
  SBNET_R8                                                                                                         \
  ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31"
#define SBNET_R64                                                                                               \
  SBNET_R32                                                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SBNET_R128                                                                                               \
  SBNET_R64                                                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "  \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "    \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
  "%123, %124, %125, %126, %127"
#define SBNET_WGMMA(N, TYPE, SUMS, A, B, TA, TB, ...)                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" SUMS "}, " A ", " B \
               ", 1, 1, 1, " TA ", " TB ";"                                                            \
               : __VA_ARGS__                                                                           \
               : "l"(a), "l"(b), "n"(kATransposed), "n"(kBTransposed))
#define SBNET_WGMMA_OF(TYPE)                                                                                       \
  if constexpr (N == 16) SBNET_WGMMA("16", TYPE, SBNET_R8, "%8", "%9", "%10", "%11", SBNET_F8(0));                 \
  if constexpr (N == 64) SBNET_WGMMA("64", TYPE, SBNET_R32, "%32", "%33", "%34", "%35", SBNET_F32(0));             \
  if constexpr (N == 128)                                                                                          \
    SBNET_WGMMA("128", TYPE, SBNET_R64, "%64", "%65", "%66", "%67", SBNET_F32(0), SBNET_F32(32));                  \
  if constexpr (N == 256)                                                                                          \
  SBNET_WGMMA("256", TYPE, SBNET_R128, "%128", "%129", "%130", "%131", SBNET_F32(0), SBNET_F32(32), SBNET_F32(64), \
              SBNET_F32(96))

// d[64 x N] += A[64 x 16] * B[N x 16]^T. Transposed: the operand's rows are the reduction.
template <class T, int N, bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void multiply_add(float (&d)[N / 2], uint64_t a, uint64_t b) {
  static_assert(N == 16 || N == 64 || N == 128 || N == 256);
  if constexpr (std::is_same_v<T, __half>) {
    SBNET_WGMMA_OF("f16");
  } else {
    SBNET_WGMMA_OF("bf16");
  }
}

#define SBNET_WGMMA_REGISTERS(N, TYPE, SUMS, A, B, ...)                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" SUMS "}, {" A "}, " B \
               ", 1, 1, 1, 0;"                                                                           \
               : __VA_ARGS__                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define SBNET_WGMMA_REGISTERS_OF(TYPE)                                                                            \
  if constexpr (N == 16) SBNET_WGMMA_REGISTERS("16", TYPE, SBNET_R8, "%8, %9, %10, %11", "%12", SBNET_F8(0));     \
  if constexpr (N == 64) SBNET_WGMMA_REGISTERS("64", TYPE, SBNET_R32, "%32, %33, %34, %35", "%36", SBNET_F32(0)); \
  if constexpr (N == 128)                                                                                         \
    SBNET_WGMMA_REGISTERS("128", TYPE, SBNET_R64, "%64, %65, %66, %67", "%68", SBNET_F32(0), SBNET_F32(32));      \
  if constexpr (N == 256)                                                                                         \
  SBNET_WGMMA_REGISTERS("256", TYPE, SBNET_R128, "%128, %129, %130, %131", "%132", SBNET_F32(0), SBNET_F32(32),   \
                        SBNET_F32(64), SBNET_F32(96))

// With A in registers: as mma.sync's fragments, a warp's 16 rows each.
template <class T, int N>
__device__ __forceinline__ void multiply_add(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 16 || N == 64 || N == 128 || N == 256);
  if constexpr (std::is_same_v<T, __half>) {
    SBNET_WGMMA_REGISTERS_OF("f16");
  } else {
    SBNET_WGMMA_REGISTERS_OF("bf16");
  }
}
#undef SBNET_WGMMA_REGISTERS_OF
#undef SBNET_WGMMA_REGISTERS
#undef SBNET_WGMMA_OF
#undef SBNET_WGMMA
#undef SBNET_R128
#undef SBNET_R64
#undef SBNET_R32
#undef SBNET_R8
#undef SBNET_F32
#undef SBNET_F8

}  // namespace sbnet::sm90::matmul
