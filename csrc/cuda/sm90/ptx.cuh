// Thin wrappers over the Hopper instructions that CUDA C++ has no name for. Shared memory is addressed by its 32-bit
// shared-window address throughout; `bar` is always the address of an mbarrier.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace sbnet::sm90 {
__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 2^v, four instructions fewer than exp2f; results that are not normal are 0.
__device__ __forceinline__ float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// The compiler must have these values in registers here: neither computed later nor found again some other way.
template <class... V>
__device__ __forceinline__ void pin(V&... v) {
  (([&] { asm volatile("" : "+r"(v)); }()), ...);
}

// ---------------------------------------------------------------- mbarriers
__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar, uint32_t arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Has the phase completed already? Never waits.
__device__ __forceinline__ bool mbar_test(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
  } while (!done);
}

// ---------------------------------------------------------------- thread block clusters
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// With fence_mbar_init() before: after cluster_wait() the mbarriers of all CTAs of the cluster are ready. (The
// releasing form would flush this CTA's memory traffic for 3,000 cycles.)
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// The address in CTA `rank` of the cluster of what lies at `address` in this one.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
// Stores 16 bytes into another CTA's shared memory and counts them on that CTA's barrier. No fence is needed on
// either side: who waits for the barrier sees the data.
__device__ __forceinline__ void store_async(uint32_t to, uint32_t bar, float a, float b, float c, float d) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
               "r"(bar), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
// Counts on the barrier at `bar` of CTA `rank` of the cluster.
__device__ __forceinline__ void mbar_arrive_at(uint32_t bar, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_to_rank(bar, rank)) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_shared(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// ---------------------------------------------------------------- named barriers, proxies
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Registers per thread of this warpgroup from here on: the pool is what the launch gave to all of them.
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------- bulk tensor copies (TMA)
__device__ __forceinline__ void prefetch_map(const CUtensorMap* m) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int x, int y, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(x), "r"(y), "r"(n)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int tap, int k) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(tap), "r"(k)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int k) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(m), "r"(bar), "r"(c), "r"(k)
      : "memory");
}
// To the same place in every CTA of the cluster whose bit is set, counted on the barrier in the same place there.
__device__ __forceinline__ void tma_multicast(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int k,
                                              uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(k), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}
__device__ __forceinline__ void tma_multicast(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int tap, int k,
                                              uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(tap), "r"(k), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t from, int c, int x, int y, int n) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(m),
               "r"(from), "r"(c), "r"(x), "r"(y), "r"(n)
               : "memory");
}
// Boxes of a plane whose channels are in slabs of 64.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int slab, int x, int y,
                                         int n) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(m), "r"(bar), "r"(c), "r"(slab), "r"(x), "r"(y), "r"(n)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t from, int c, int slab, int x, int y, int n) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(m),
               "r"(from), "r"(c), "r"(slab), "r"(x), "r"(y), "r"(n)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All committed stores but the last kPending groups have read their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---------------------------------------------------------------- loads that must not pass grid_dependency_wait()
// (__ldg may: the compiler takes it for a load of constant memory.)
__device__ __forceinline__ int load_int(const int32_t* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ float load_float(const void* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_half(const void* p) {  // 16 bits of either type
  uint32_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// ---------------------------------------------------------------- a store that stays whole
// (Of a uint4 put together from registers the compiler may make four stores.)
__device__ __forceinline__ void store_words(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---------------------------------------------------------------- 16-bit pairs, transposing shared memory access
template <class T>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&h);
  }
}
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>)
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  else
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
}
// max(v, low) of pairs; NaN stays.
template <class T>
__device__ __forceinline__ uint32_t max_pair(uint32_t v, uint32_t low) {
  if constexpr (std::is_same_v<T, __half>)
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(low));
  else
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(low));
  return v;
}
__device__ __forceinline__ void stmatrix_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void stmatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---------------------------------------------------------------- WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// A K-major operand with 128-byte swizzle at `address`: the low half of its descriptor, to which offsets >> 4 may be
// added. The high half holds `stride`, the bytes from one group of 8 rows to the next. The swizzle XORs address bits
// 4-6 with bits 7-9 of the FINAL address, so address and stride need only be multiples of 128 as long as TMA wrote
// the data (it swizzles by address too).
__device__ __forceinline__ uint32_t wgmma_operand(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1u << 16; }
__device__ constexpr uint64_t wgmma_layout(uint32_t stride) {
  return static_cast<uint64_t>(stride >> 4 | 1u << 30) << 32;
}

// Lists of operands, here and in */ptx.cuh: eight sums and more, registers from the first on.
#define SBNET_F8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SBNET_F16(i) SBNET_F8(i), SBNET_F8(i + 8)
#define SBNET_F32(i) SBNET_F16(i), SBNET_F16(i + 16)
#define SBNET_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SBNET_R16 SBNET_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SBNET_R24 SBNET_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SBNET_R32 SBNET_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SBNET_R40 SBNET_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SBNET_R48 SBNET_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SBNET_R64 SBNET_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SBNET_R72 SBNET_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SBNET_R96                                                                              \
  SBNET_R72                                                                                    \
  ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89" \
  ", %90, %91, %92, %93, %94, %95"
#define SBNET_R128                                                                             \
  SBNET_R64                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81" \
  ", %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99" \
  ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114" \
  ", %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// N / 2 sums of a thread, then a, b, accumulate, and which operand's rows are the reduction.
#define SBNET_WGMMA(N, TYPE, SUMS, A, B, P, TA, TB, ...)                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
               "." TYPE " {" SUMS "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"                               \
               : __VA_ARGS__                                                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kATransposed), "n"(kBTransposed))
#define SBNET_WGMMA_OF(TYPE)                                                                                           \
  if constexpr (N == 16) SBNET_WGMMA("16", TYPE, SBNET_R8, "%8", "%9", "%10", "%11", "%12", SBNET_F8(0));              \
  if constexpr (N == 32) SBNET_WGMMA("32", TYPE, SBNET_R16, "%16", "%17", "%18", "%19", "%20", SBNET_F16(0));          \
  if constexpr (N == 48)                                                                                               \
    SBNET_WGMMA("48", TYPE, SBNET_R24, "%24", "%25", "%26", "%27", "%28", SBNET_F16(0), SBNET_F8(16));                 \
  if constexpr (N == 64) SBNET_WGMMA("64", TYPE, SBNET_R32, "%32", "%33", "%34", "%35", "%36", SBNET_F32(0));          \
  if constexpr (N == 80)                                                                                               \
    SBNET_WGMMA("80", TYPE, SBNET_R40, "%40", "%41", "%42", "%43", "%44", SBNET_F32(0), SBNET_F8(32));                 \
  if constexpr (N == 96)                                                                                               \
    SBNET_WGMMA("96", TYPE, SBNET_R48, "%48", "%49", "%50", "%51", "%52", SBNET_F32(0), SBNET_F16(32));                \
  if constexpr (N == 128)                                                                                              \
    SBNET_WGMMA("128", TYPE, SBNET_R64, "%64", "%65", "%66", "%67", "%68", SBNET_F32(0), SBNET_F32(32));               \
  if constexpr (N == 144)                                                                                              \
    SBNET_WGMMA("144", TYPE, SBNET_R72, "%72", "%73", "%74", "%75", "%76", SBNET_F32(0), SBNET_F32(32), SBNET_F8(64)); \
  if constexpr (N == 192)                                                                                              \
    SBNET_WGMMA("192", TYPE, SBNET_R96, "%96", "%97", "%98", "%99", "%100", SBNET_F32(0), SBNET_F32(32),               \
                SBNET_F32(64));                                                                                        \
  if constexpr (N == 256)                                                                                              \
  SBNET_WGMMA("256", TYPE, SBNET_R128, "%128", "%129", "%130", "%131", "%132", SBNET_F32(0), SBNET_F32(32),            \
              SBNET_F32(64), SBNET_F32(96))

// d[64 x N] (+)= A[64 x 16] * B[N x 16]^T, in the first N / 2 of d. Transposed: the operand's rows are the reduction.
template <class T, int N, bool kATransposed = false, bool kBTransposed = false, int kSums>
__device__ __forceinline__ void wgmma(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  static_assert((N == 16 || N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 128 || N == 144 || N == 192 ||
                 N == 256) &&
                N / 2 <= kSums);
  if constexpr (std::is_same_v<T, __half>) {
    SBNET_WGMMA_OF("f16");
  } else {
    SBNET_WGMMA_OF("bf16");
  }
}
// d[64 x 128] (+)= A[64 x 32] * B[128 x 32]^T of float8_e4m3fn, and of int8.
__device__ __forceinline__ void wgmma_bytes(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SBNET_R64 "}, %64, %65, p, 1, 1;\n}\n"
      : SBNET_F32(0), SBNET_F32(32)
      : "l"(a), "l"(b), "r"(accumulate));
}
#define SBNET_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define SBNET_I16(i) SBNET_I4(i), SBNET_I4(i + 4), SBNET_I4(i + 8), SBNET_I4(i + 12)
__device__ __forceinline__ void wgmma_bytes(int32_t (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" SBNET_R64 "}, %64, %65, p;\n}\n"
      : SBNET_I16(0), SBNET_I16(16), SBNET_I16(32), SBNET_I16(48)
      : "l"(a), "l"(b), "r"(accumulate));
}
#undef SBNET_I16
#undef SBNET_I4
#define SBNET_WGMMA_REGISTERS(N, TYPE, SUMS, A, B, P, TB, ...)                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
               "." TYPE " {" SUMS "}, {" A "}, " B ", p, 1, 1, " TB ";\n}\n"                                     \
               : __VA_ARGS__                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBTransposed))
#define SBNET_WGMMA_REGISTERS_OF(TYPE)                                                                           \
  if constexpr (N == 16)                                                                                         \
    SBNET_WGMMA_REGISTERS("16", TYPE, SBNET_R8, "%8, %9, %10, %11", "%12", "%13", "%14", SBNET_F8(0));           \
  if constexpr (N == 64)                                                                                         \
    SBNET_WGMMA_REGISTERS("64", TYPE, SBNET_R32, "%32, %33, %34, %35", "%36", "%37", "%38", SBNET_F32(0));       \
  if constexpr (N == 128)                                                                                        \
    SBNET_WGMMA_REGISTERS("128", TYPE, SBNET_R64, "%64, %65, %66, %67", "%68", "%69", "%70", SBNET_F32(0),       \
                          SBNET_F32(32));                                                                        \
  if constexpr (N == 256)                                                                                        \
  SBNET_WGMMA_REGISTERS("256", TYPE, SBNET_R128, "%128, %129, %130, %131", "%132", "%133", "%134", SBNET_F32(0), \
                        SBNET_F32(32), SBNET_F32(64), SBNET_F32(96))

// With A in registers: as mma.sync's fragments, a warp's 16 rows each.
template <class T, int N = 64, bool kBTransposed = false>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {
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

}  // namespace sbnet::sm90
