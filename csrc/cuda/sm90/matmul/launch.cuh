// Host side of the block-sparse products: matrices as TMA sees them, the arguments of a launch, the switch over types.
#pragma once
#include <algorithm>

#include "core/weights/plan.h"
#include "core/weights/rows.h"
#include "cuda/sm90/conv/conv_host.cuh"
#include "cuda/sm90/matmul/tiles.cuh"

namespace sbnet::sm90::matmul {

constexpr const char* kMatmulOp = "blocksparse_matmul";

struct MatmulMaps {
  CUtensorMap x, weight, y;
};

// A TensorView as rows of adjacent features.
struct Matrix {
  void* data;
  int64_t rows, features, stride;  // elements from row to row
  DType dtype;
};
// False: its rows are not equally far apart, or TMA cannot copy them.
inline bool matrix_of(const TensorView& t, Matrix* m) {
  *m = {t.data, 1, t.size[1], 0, t.dtype};
  if (t.stride[1] != 1 && t.size[1] != 1) return false;
  for (const int d : {3, 2, 0}) {  // W, H, N: innermost first
    if (t.size[d] == 1) continue;
    if (m->rows > 1 && t.stride[d] != m->stride * m->rows) return false;
    if (m->rows == 1) m->stride = t.stride[d];
    m->rows *= t.size[d];
  }
  if (m->rows == 1) m->stride = (m->features + 7) / 8 * 8;
  return reinterpret_cast<uintptr_t>(m->data) % 16 == 0 && m->stride % 8 == 0 && m->stride >= m->features &&
         m->stride < (int64_t{1} << 38) && m->rows >= 1 && m->rows <= (1 << 30) && m->features <= (1 << 30);
}

// Boxes of 64 features x box_rows.
inline Status matrix_map(CUtensorMap* map, const char* op, const char* name, const Matrix& m, int box_rows) {
  const cuuint64_t size[2] = {cuuint64_t(m.features), cuuint64_t(m.rows)}, stride[1] = {cuuint64_t(m.stride) * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(box_rows)};
  return make_map(map, m.dtype, name, 2, m.data, size, stride, box, CU_TENSOR_MAP_SWIZZLE_128B, op);
}

// Boxes of weights: 64 x 64, or whole smaller blocks as rows of 64.
inline Matrix weight_matrix(const BlocksparseMatmulParams& p) {
  const int64_t size = p.layout.shape.block_size, width = size < 64 ? 64 : size;
  return {const_cast<void*>(p.weight), p.layout.shape.blocks * size * size / width, width, width, p.x.dtype};
}
inline int weight_box_rows(int64_t block_size) {
  return static_cast<int>(block_size < 64 ? block_size * block_size / 64 : 64);
}

inline Status make_maps(const BlocksparseMatmulParams& p, int rows_x, int rows_y, MatmulMaps* maps) {
  Matrix x, y;
  matrix_of(p.x, &x), matrix_of(p.y, &y);
  SBNET_TRY(matrix_map(&maps->x, kMatmulOp, "x", x, rows_x));
  SBNET_TRY(matrix_map(&maps->y, kMatmulOp, "out", y, rows_y));
  return matrix_map(&maps->weight, kMatmulOp, "weight", weight_matrix(p), weight_box_rows(p.layout.shape.block_size));
}

inline int64_t rows_of(const TensorView& t) { return t.size[0] * t.size[2] * t.size[3]; }

// For `workers` clusters.
inline TileArgs tile_args(const BlocksparseMatmulParams& p, const TilePlan& plan, int tile_rows, int workers) {
  constexpr int64_t kBandBytes = 24 << 20;  // of input, half of the L2 cache
  TileArgs a = {};
  a.plan = p.plan;
  a.plan_words = static_cast<int>(p.plan_words);
  a.record_words = plan.record_words();
  a.table = static_cast<int>(plan.table);
  a.groups = static_cast<int>(plan.groups);
  a.group_features = plan.cta_features() * plan.cluster;
  a.block_size = p.layout.shape.block_size;
  a.rows = static_cast<int>(row_capacity(p.x, p.active));
  a.tile_rows = tile_rows;
  a.tiles = (a.rows + tile_rows - 1) / tile_rows;
  const int64_t bands = p.in_features() * 2 * a.rows / kBandBytes + 1;
  a.band = static_cast<int>((a.tiles + bands - 1) / bands);
  a.items = a.groups * a.tiles;
  const int rest = a.items % workers;
  a.whole = a.items - (2 * rest <= workers ? rest : 0);
  a.units = a.whole + 2 * (a.items - a.whole);
  a.cluster = plan.cluster;
  a.features = static_cast<int>(p.out_features());
  a.bias = p.bias;
  a.bias_f32 = p.bias_dtype == DType::kF32;
  a.activation = p.activation;
  a.activation_param = p.activation_param;
  return a;
}

// How many clusters the device holds at once, one CTA to an SM. Sets the kernel's attributes on first use.
template <auto kKernel>
Status workers_of(const char* op, const DeviceInfo& device, int threads, int shared, int log_cluster, int* workers) {
  static std::atomic<int> known[kMaxDevices][3];
  const bool cached = device.index < kMaxDevices;
  *workers = cached ? known[device.index][log_cluster].load(std::memory_order_acquire) : 0;
  if (*workers > 0) return ok_status();
  SBNET_CUDA_TRY(op, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  *workers = device.sm_count;
  if (log_cluster) {
    const ClusterLaunch whole(std::max(device.sm_count >> log_cluster, 1) << log_cluster, threads, shared, log_cluster,
                              nullptr);
    SBNET_CUDA_TRY(op, cudaOccupancyMaxActiveClusters(workers, kKernel, &whole.config));
  }
  if (*workers < 1)
    return make_status(Code::kUnsupported, "%s: device: expected room for clusters of %d, got none on device %d", op,
                       1 << log_cluster, device.index);
  if (cached) known[device.index][log_cluster].store(*workers, std::memory_order_release);
  return ok_status();
}

// f(a value of the element type, integral constants: side of a box, transposed).
template <class F>
Status dispatch(const BlocksparseMatmulParams& p, F&& f) {
  const auto directions = [&](auto type, auto unit) {
    return p.transposed ? f(type, unit, std::true_type()) : f(type, unit, std::false_type());
  };
  const auto units = [&](auto type) {
    const int size = p.layout.shape.block_size;
    if (size == 16) return directions(type, std::integral_constant<int, 16>());
    if (size == 32) return directions(type, std::integral_constant<int, 32>());
    return directions(type, std::integral_constant<int, 64>());
  };
  return p.x.dtype == DType::kBF16 ? units(__nv_bfloat16()) : units(__half());
}

// wide.cu, quad.cu, narrow.cu, weight_grad.cu
Status launch_wide(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_quad(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_narrow(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_weight_grad(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream);
// Rows of a box of the quad kernel's input that lie side by side in a block; 0: the kernel cannot read such blocks.
int quad_box_rows(const BlockGrid& grid, int most);
// The most CTAs that share a tile of the narrow kernel, as a power of 2.
int narrow_log_cluster(const BlocksparseMatmulParams& p, int sm_count);

}  // namespace sbnet::sm90::matmul
