// PTX that every tensor-core kernel since sm_80 shares: cp.async, ldmatrix, mma.sync. Hopper's own is in sm90/.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/tf32.cuh"

namespace sbnet {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 (4) bytes from global to shared memory past the registers; writes zeros where !in, and reads nothing then.
// Does nothing where !issue: a predicate, so that a pipeline's tail needs no branch.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool in, bool issue = true) {
  asm volatile(
      "{\n"
      ".reg .pred issue;\n"
      "setp.ne.b32 issue, %3, 0;\n"
      "@issue cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(in ? 16 : 0), "r"(static_cast<int>(issue))
      : "memory");
}
// The same in kernels that issue little but products, where the form with a size is slower: stores zeros where !in.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t shared, const void* global, bool in) {
  asm volatile(
      "{\n"
      ".reg .pred in;\n"
      ".reg .b32 zero;\n"
      "mov.b32 zero, 0;\n"
      "setp.ne.b32 in, %2, 0;\n"
      "@in cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "@!in st.shared.v4.b32 [%0], {zero, zero, zero, zero};\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(in))
      : "memory");
}
// And without a condition.
__device__ __forceinline__ void cp_async_16_whole(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool in) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(in ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements (or 8x4 of 32-bit ones): lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrix_x4(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// d[16 x 8] += a[16 x 32 bytes] b[32 bytes x 8]: k is 32 of int8, 16 halves, or 8 floats whose low 13 bits are not
// read. The lane-to-byte layout of the operands is the same for all element types. Sum: int32 of int8, else float.
template <class T, class Sum>
__device__ __forceinline__ void mma_16x8(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8<float>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8<int8_t>(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace sbnet
