// More PTX for tensor cores since sm_80, for float16 and bfloat16: products that the compiler may move, transposed
// operands. tests/tools/emulator/products.h stands for it where there is no GPU.
#pragma once
#include "cuda/mma.cuh"

namespace sbnet::portable {

// 16 bytes from global to shared memory, always.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// 2^v, four instructions fewer than exp2f; results that are not normal are 0.
__device__ __forceinline__ float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// 1 / v, one instruction; 0 where that is not normal.
__device__ __forceinline__ float reciprocal_approx(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// Of `threads` threads, a whole number of warps; id: 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Products m16n8k16: sum += a b, and sum = a b, which needs no zeros. Not volatile, so that the compiler may move them.
template <class T>
struct Product;
#define SBNET_PRODUCT(type, name)                                                                                   \
  template <>                                                                                                       \
  struct Product<type> {                                                                                            \
    static __device__ __forceinline__ void add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
      asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                                    \
          ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                              \
          : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                  \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                          \
    }                                                                                                               \
    static __device__ __forceinline__ void set(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
      asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                                    \
          ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"                                          \
          : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])                                                  \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));                                \
    }                                                                                                               \
  };
SBNET_PRODUCT(__half, "f16")
SBNET_PRODUCT(__nv_bfloat16, "bf16")
#undef SBNET_PRODUCT

}  // namespace sbnet::portable
