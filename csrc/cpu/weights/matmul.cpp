// Products with block-sparse weights on the CPU: checks, tasks, threads. The arithmetic is in matmul_fma.h
// and matmul_pairs.h.
#include "core/weights/matmul.h"

#include <algorithm>
#include <new>

#include "core/weights/rows.h"
#include "cpu/simd/isa.h"
#include "cpu/weights/matmul_kernels.h"

namespace sbnet {

void list_rows(const TensorView& a, const TensorView& b, const ActiveView& active, int64_t first, int64_t count,
               int64_t* a_rows, int64_t* b_rows) {
  for (int64_t i = 0; i < count; ++i) {
    const RowPixel pixel = row_pixel(a, active, first + i);
    a_rows[i] = row_offset(a, pixel);
    b_rows[i] = row_offset(b, pixel);
  }
}

namespace {

constexpr int64_t kTasksPerThread = 4;    // enough for the threads to finish together
constexpr int64_t kLeastPairsBlock = 16;  // outputs of a vector of pairs

int64_t wanted_tasks(int32_t threads) { return std::max(threads, 1) * kTasksPerThread; }

// Blocks of 8 do not fill a vector of AVX-512.
const MatmulKernels& kernels(int64_t block_size) {
  (void)block_size;
#if defined(__x86_64__)
  const Isa isa = chosen_isa();
  if (isa >= Isa::kAvx512 && block_size > 8) return kMatmulKernelsAvx512;
  if (isa >= Isa::kAvx2) return kMatmulKernelsAvx2;
#endif
  return kMatmulKernelsGeneric;
}

// Of forward and input gradient: pairs of 16 bits, where the processor multiplies them, else in float32.
const MatmulKernels& kernels(const BlocksparseMatmulParams& p) {
  const int64_t size = p.layout.shape.block_size;
#if defined(__x86_64__)
  const Isa isa = chosen_isa();
  const bool brain = p.x.dtype == DType::kBF16, half = p.x.dtype == DType::kF16;
  if (size >= kLeastPairsBlock) {
#if defined(SBNET_AMX)
    if ((brain && isa >= Isa::kAmx) || (half && isa >= Isa::kAmxFp16)) return kMatmulKernelsAmx;
#endif
    if (brain && isa >= Isa::kAvx512 && has_bf16()) return kMatmulKernelsBf16;
  }
#endif
  return kernels(size);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Rows there are: of active blocks, as many as their count says.
int64_t row_count(const TensorView& t, const ActiveView& active) {
  if (!active.indices) return row_capacity(t, active);
  return std::clamp<int64_t>(*active.count, 0, active.capacity) * active.grid.size[0] * active.grid.size[1];
}

int64_t lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Where everything lies in the workspace: the counter of tasks, the packed weights, one area a thread.
struct Plan {
  int64_t tile_rows;  // 0: nothing to do
  bool packs;         // float32 weights [c, k] without gates are read as they are
  int64_t weights_at, scratch_at, x_bytes, rows_bytes, scratch_bytes, total_bytes;
};

Plan make_plan(const BlocksparseMatmulParams& p, int32_t threads) {
  const BlockLayoutShape& shape = p.layout.shape;
  const int64_t features = p.in_blocks() * shape.block_size;
  const int64_t group = kernels(p).group, bytes = kernels(p).element_bytes;
  const int64_t fit = std::clamp(kMatmulTileBytes / (features * bytes) / group * group, group, kMatmulRows);
  const int64_t rows = ceil_div(row_capacity(p.x, p.active), group) * group;
  Plan plan = {};
  // Two tiles a thread, where there are so many rows: tasks of few rows read the weights too often.
  const int64_t share = ceil_div(ceil_div(rows, 2 * std::max(threads, 1)), group) * group;
  plan.tile_rows = std::min(fit, share);
  plan.packs = p.transposed || p.gate || p.x.dtype != DType::kF32;
  plan.weights_at = 64;
  plan.scratch_at =
      plan.weights_at + (plan.packs ? lines(shape.blocks * shape.block_size * shape.block_size * bytes) : 0);
  plan.x_bytes = lines(plan.tile_rows * features * bytes);
  plan.rows_bytes = lines(plan.tile_rows * 8);
  plan.scratch_bytes = plan.x_bytes + 2 * plan.rows_bytes;
  plan.total_bytes = plan.scratch_at + std::max(threads, 1) * plan.scratch_bytes;
  return plan;
}

// Each worker owns a scratch area and takes tasks until none is left: columns differ in length.
template <class F>
void run_tasks(int64_t tasks, char* workspace, int64_t scratch_at, int64_t scratch_bytes, const Parallel& parallel,
               const F& body) {
  int64_t* next = new (workspace) int64_t{0};
  parallel_for(parallel, std::max(parallel.threads, 1), 1, [&](int64_t begin, int64_t) {
    char* scratch = workspace + scratch_at + begin * scratch_bytes;
    for (;;) {
      const int64_t task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      body(task, scratch);
    }
  });
}

void multiply(const BlocksparseMatmulParams& p, char* workspace, const Parallel& parallel) {
  const Plan plan = make_plan(p, parallel.threads);
  const BlockLayoutShape& shape = p.layout.shape;
  const MatmulKernels& kernel = kernels(p);
  const int64_t rows = row_count(p.x, p.active);
  if (!rows) return;
  const void* weight = p.weight;
  if (plan.packs) {
    void* packed = workspace + plan.weights_at;
    parallel_for(parallel, shape.blocks, std::max<int64_t>(4096 / (shape.block_size * shape.block_size), 1),
                 [&](int64_t begin, int64_t end) { kernel.pack_weights(p, packed, begin, end); });
    weight = packed;
  }
  const int64_t tiles = ceil_div(rows, plan.tile_rows), out = p.out_blocks();
  const int64_t wanted = wanted_tasks(parallel.threads);
  const int64_t per_task = ceil_div(out, std::clamp<int64_t>(ceil_div(wanted, tiles), 1, out));
  const int64_t parts = ceil_div(out, per_task);
  run_tasks(tiles * parts, workspace, plan.scratch_at, plan.scratch_bytes, parallel, [&](int64_t t, char* scratch) {
    MatmulTask task;
    task.weight = weight;
    task.x = scratch;
    task.x_rows = reinterpret_cast<int64_t*>(scratch + plan.x_bytes);
    task.y_rows = reinterpret_cast<int64_t*>(scratch + plan.x_bytes + plan.rows_bytes);
    const int64_t first = t / parts * plan.tile_rows;
    task.rows = std::min(plan.tile_rows, rows - first);
    list_rows(p.x, p.y, p.active, first, task.rows, task.x_rows, task.y_rows);
    task.in_blocks = p.in_blocks(), task.in_features = p.in_features(), task.out_features = p.out_features();
    task.start = p.start(), task.entries = p.entries();
    task.first_block = t % parts * per_task;
    task.end_block = std::min(out, task.first_block + per_task);
    kernel.multiply(p, task);
  });
}

struct GradPlan {
  int64_t chunk_bytes, sums_bytes, rows_bytes, scratch_bytes;
};

GradPlan make_grad_plan(int64_t size) {
  GradPlan plan = {kMatmulDepth * size * 4, size * size * 4, kMatmulDepth * 8, 0};
  plan.scratch_bytes = 2 * plan.chunk_bytes + plan.sums_bytes + 2 * plan.rows_bytes;
  return plan;
}

void weight_grad(const BlocksparseWeightGradParams& p, char* workspace, const Parallel& parallel) {
  const BlockLayoutShape& shape = p.layout.shape;
  const MatmulKernels& kernel = kernels(shape.block_size);
  const GradPlan plan = make_grad_plan(shape.block_size);
  const int64_t per_task = ceil_div(shape.blocks, wanted_tasks(parallel.threads));
  if (!per_task) return;
  run_tasks(ceil_div(shape.blocks, per_task), workspace, 64, plan.scratch_bytes, parallel,
            [&](int64_t t, char* scratch) {
              WeightGradTask task;
              task.x = reinterpret_cast<float*>(scratch);
              task.dy = reinterpret_cast<float*>(scratch + plan.chunk_bytes);
              task.sums = reinterpret_cast<float*>(scratch + 2 * plan.chunk_bytes);
              task.x_rows = reinterpret_cast<int64_t*>(scratch + 2 * plan.chunk_bytes + plan.sums_bytes);
              task.dy_rows = task.x_rows + kMatmulDepth;
              for (int i = 0; i < p.pairs; ++i) task.rows[i] = row_count(p.x[i], p.active);
              task.first_block = t * per_task;
              task.end_block = std::min(shape.blocks, task.first_block + per_task);
              kernel.weight_grad(p, task);
            });
}

}  // namespace
}  // namespace sbnet

extern "C" {

int64_t sbnet_blocksparse_matmul_workspace_bytes_cpu(const sbnet::BlocksparseMatmulParams* p, int32_t threads) {
  return sbnet::validate(*p).ok() ? sbnet::make_plan(*p, threads).total_bytes : 0;
}

sbnet::Status sbnet_blocksparse_matmul_cpu(const sbnet::BlocksparseMatmulParams* p, void* workspace,
                                           const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  sbnet::multiply(*p, static_cast<char*>(workspace), *parallel);
  return sbnet::ok_status();
}

int64_t sbnet_blocksparse_weight_grad_workspace_bytes_cpu(const sbnet::BlocksparseWeightGradParams* p,
                                                          int32_t threads) {
  if (!sbnet::validate(*p).ok()) return 0;
  return 64 + std::max(threads, 1) * sbnet::make_grad_plan(p->layout.shape.block_size).scratch_bytes;
}

sbnet::Status sbnet_blocksparse_weight_grad_cpu(const sbnet::BlocksparseWeightGradParams* p, void* workspace,
                                                const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  sbnet::weight_grad(*p, static_cast<char*>(workspace), *parallel);
  return sbnet::ok_status();
}
}
