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
constexpr int64_t kSlabBytes = 16 << 20;  // of packed rows of a weight gradient, where kMatmulDepth rows take no more

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

// Pairs of 16 bits, where the processor multiplies them, else in float32.
const MatmulKernels& kernels(DType dtype, int64_t size) {
#if defined(__x86_64__)
  const Isa isa = chosen_isa();
  const bool brain = dtype == DType::kBF16, half = dtype == DType::kF16;
  if (size >= kLeastPairsBlock) {
#if defined(SBNET_AMX)
    if ((brain && isa >= Isa::kAmx) || (half && isa >= Isa::kAmxFp16)) return kMatmulKernelsAmx;
#endif
    if (brain && isa >= Isa::kAvx512 && has_bf16()) return kMatmulKernelsBf16;
  }
#else
  (void)dtype;
#endif
  return kernels(size);
}
const MatmulKernels& kernels(const BlocksparseMatmulParams& p) { return kernels(p.x.dtype, p.layout.shape.block_size); }
const MatmulKernels& kernels(const BlocksparseWeightGradParams& p) {
  return kernels(p.x[0].dtype, p.layout.shape.block_size);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Rows there are: of active blocks, as many as their count says.
int64_t row_count(const TensorView& t, const ActiveView& active) {
  if (!active.given()) return row_capacity(t, active);
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

// Where everything lies: the counter of tasks, which panels blocks read, the panels of a slab of rows, sums.
struct GradPlan {
  int64_t slab_rows, panels, panel_bytes;
  bool sums_of_all;  // rows of several slabs: sums of all blocks lie between them
  int64_t used_at, panels_at, sums_at, scratch_bytes, total_bytes;
};

GradPlan make_grad_plan(const BlocksparseWeightGradParams& p, int32_t threads) {
  const BlockLayoutShape& shape = p.layout.shape;
  const MatmulKernels& kernel = kernels(p);
  const int64_t row_bytes = shape.block_size * kernel.element_bytes;
  int64_t rows = 0;
  for (int i = 0; i < p.pairs; ++i)
    rows += ceil_div(row_capacity(p.x[i], p.active), kernel.grad_step) * kernel.grad_step;
  GradPlan plan = {};
  plan.panels = shape.block_rows + shape.block_columns;
  const int64_t fit = kSlabBytes / (plan.panels * row_bytes) / kMatmulDepth * kMatmulDepth;
  plan.slab_rows = std::min(std::max(rows, kernel.grad_step), std::max(fit, kMatmulDepth));
  plan.panel_bytes = lines(plan.slab_rows * row_bytes);
  plan.sums_of_all = rows > plan.slab_rows;
  plan.used_at = 64;
  plan.panels_at = plan.used_at + lines(plan.panels);
  plan.sums_at = plan.panels_at + plan.panels * plan.panel_bytes;
  plan.scratch_bytes = shape.block_size * shape.block_size * 4;
  plan.total_bytes = plan.sums_at + (plan.sums_of_all ? shape.blocks : std::max(threads, 1)) * plan.scratch_bytes;
  return plan;
}

// Which panels blocks of the layout read: features of which no weight is stored are not packed.
void find_used(const BlocksparseWeightGradParams& p, int64_t panels, char* used) {
  const BlockLayoutShape& shape = p.layout.shape;
  std::fill_n(used, panels, 0);
  for (int64_t b = 0; b < shape.blocks; ++b) {
    const int64_t c = p.layout.coords[2 * b], k = p.layout.coords[2 * b + 1];
    if (c < 0 || c >= shape.block_rows || k < 0 || k >= shape.block_columns) continue;
    used[c] = used[shape.block_rows + k] = 1;
  }
}

// The rows begin ... end of one panel. The pairs lie one behind the other, starts[i] ... starts[i + 1], each filled up
// to whole steps.
void pack_panel(const BlocksparseWeightGradParams& p, const MatmulKernels& kernel, const int64_t* starts, int64_t begin,
                int64_t end, int64_t panel, char* to) {
  const BlockLayoutShape& shape = p.layout.shape;
  const bool left = panel < shape.block_rows;
  const int64_t size = shape.block_size, feature = (left ? panel : panel - shape.block_rows) * size;
  int64_t x_rows[kMatmulDepth], dy_rows[kMatmulDepth];
  for (int i = 0; i < p.pairs; ++i)
    for (int64_t r = std::max(begin, starts[i]); r < std::min(end, starts[i + 1]);) {
      const int64_t count = std::min(kMatmulDepth, std::min(end, starts[i + 1]) - r), first = r - starts[i];
      const int64_t there = std::clamp<int64_t>(row_count(p.x[i], p.active) - first, 0, count);
      list_rows(p.x[i], p.dy[i], p.active, first, there, x_rows, dy_rows);
      int64_t* rows = left ? x_rows : dy_rows;
      std::fill(rows + there, rows + count, int64_t{-1});
      kernel.pack_rows(left ? p.x[i] : p.dy[i], rows, count, feature, size, left,
                       to + (r - begin) * size * kernel.element_bytes);
      r += count;
    }
}

void weight_grad(const BlocksparseWeightGradParams& p, char* workspace, const Parallel& parallel) {
  const BlockLayoutShape& shape = p.layout.shape;
  const MatmulKernels& kernel = kernels(p);
  const GradPlan plan = make_grad_plan(p, parallel.threads);
  const int64_t per_task = ceil_div(shape.blocks, wanted_tasks(parallel.threads));
  if (!per_task) return;
  int64_t starts[kMaxWeightGradPairs + 1] = {};
  for (int i = 0; i < p.pairs; ++i)
    starts[i + 1] = starts[i] + ceil_div(row_count(p.x[i], p.active), kernel.grad_step) * kernel.grad_step;
  char *used = workspace + plan.used_at, *panels = workspace + plan.panels_at;
  find_used(p, plan.panels, used);
  const int64_t rows = starts[p.pairs];
  for (int64_t begin = 0; !begin || begin < rows; begin += plan.slab_rows) {
    const int64_t end = std::min(rows, begin + plan.slab_rows);
    parallel_for(parallel, plan.panels, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        if (used[i]) pack_panel(p, kernel, starts, begin, end, i, panels + i * plan.panel_bytes);
    });
    const int64_t scratch_bytes = plan.sums_of_all ? 0 : plan.scratch_bytes;
    run_tasks(ceil_div(shape.blocks, per_task), workspace, plan.sums_at, scratch_bytes, parallel,
              [&](int64_t t, char* scratch) {
                WeightGradTask task;
                task.x = panels;
                task.dy = panels + shape.block_rows * plan.panel_bytes;
                task.panel_bytes = plan.panel_bytes;
                task.rows = end - begin;
                task.sums = reinterpret_cast<float*>(scratch);
                task.sums_of_all = plan.sums_of_all;
                task.first = !begin, task.last = end == rows;
                task.first_block = t * per_task;
                task.end_block = std::min(shape.blocks, task.first_block + per_task);
                kernel.weight_grad(p, task);
              });
  }
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
  return sbnet::validate(*p).ok() ? sbnet::make_grad_plan(*p, threads).total_bytes : 0;
}

sbnet::Status sbnet_blocksparse_weight_grad_cpu(const sbnet::BlocksparseWeightGradParams* p, void* workspace,
                                                const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  sbnet::weight_grad(*p, static_cast<char*>(workspace), *parallel);
  return sbnet::ok_status();
}
}
