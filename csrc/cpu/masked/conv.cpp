// sparse_conv2d on the CPU: checks, the list of jobs, threads, the fringe. The arithmetic is in conv_fma.h and
// conv_amx.cpp.
#include <algorithm>
#include <cstring>
#include <new>

#include "core/layer.h"
#include "cpu/lists/fringe.h"
#include "cpu/masked/conv_float8.h"
#include "cpu/masked/conv_run.h"
#include "cpu/masked/conv_select.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

constexpr int64_t kEnoughPixels = 128;  // of a tile: its work hides that its weights are read
constexpr int64_t kJobsPerThread = 4;   // enough for the threads to finish together, few enough to share patches

// Those that compute in float32, whatever the elements are.
const ConvKernels& float_kernels() {
#if defined(__x86_64__)
  switch (chosen_isa()) {
    case Isa::kAmxFp16:
    case Isa::kAmx:
    case Isa::kAvx512:
      return kConvKernelsAvx512;
    case Isa::kAvx2:
      return kConvKernelsAvx2;
    case Isa::kGeneric:
      break;
  }
#endif
  return kConvKernelsGeneric;
}

// The weights alone decide: they may have been packed before planes and blocks are known.
const ConvKernels& kernels(const TensorView& weight, int32_t groups) {
  const bool quantized = weight.dtype == DType::kI8;
  if (quantized && is_depthwise(weight, groups)) return float_kernels();
#if defined(__x86_64__)
  const Isa isa = chosen_isa();
  if (quantized) {
#if defined(SBNET_AMX)
    if (!int8_amx_declines(weight)) return kConvInt8KernelsAmx;
#endif
    if (isa >= Isa::kAvx512 && has_vnni()) return kConvInt8KernelsVnni;
    return isa >= Isa::kAvx2 ? kConvInt8KernelsAvx2 : kConvInt8KernelsGeneric;
  }
#if defined(SBNET_AMX)
  if (!amx_declines(weight)) return kConvKernelsAmx;
#endif
#endif
  return quantized ? kConvInt8KernelsGeneric : float_kernels();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const ConvKernels& conv_kernels(const TensorView& weight) { return kernels(weight, 1); }

bool find_rect(const ConvPlan& plan, int64_t index, ConvRect* rect) {
  const int64_t per_block = plan.tiles[0] * plan.tiles[1], tile = index % per_block;
  const int32_t* block = plan.p.active.indices + 3 * (index / per_block);
  const BlockGrid& grid = plan.p.active.grid;
  const int64_t n = block[0], i = block[1], j = block[2];
  if (n < 0 || n >= plan.p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) return false;
  const int64_t down = tile / plan.tiles[1] * plan.tile[0], right = tile % plan.tiles[1] * plan.tile[1];
  rect->n = n;
  rect->row = i * grid.size[0] + down;
  rect->column = j * grid.size[1] + right;
  const int64_t height = std::min({int64_t{plan.tile[0]}, grid.size[0] - down, plan.p.y.size[2] - rect->row});
  const int64_t width = std::min({int64_t{plan.tile[1]}, grid.size[1] - right, plan.p.y.size[3] - rect->column});
  rect->height = static_cast<int32_t>(height);
  rect->width = static_cast<int32_t>(width);
  return height > 0 && width > 0;
}

ConvJob conv_job(const ConvPlan& plan, const void* weights, char* scratch) {
  ConvJob job{};
  job.weights = weights;
  job.patch = scratch + plan.patch_at;
  job.inputs = reinterpret_cast<float*>(scratch + plan.inputs_at);
  job.sums = reinterpret_cast<float*>(scratch + plan.sums_at);
  job.pixels = reinterpret_cast<ConvPixels*>(scratch + plan.pixels_at);
  return job;
}

namespace {

void pack(const ConvLayout& layout, const ConvKernels& kernel, void* packed, const Parallel& parallel) {
  parallel_for(parallel, layout.groups * ceil_div(layout.group_out, layout.lanes), 1,
               [&](int64_t begin, int64_t end) { kernel.pack_weights(layout, packed, begin, end); });
}

// `weights`: packed, or null: they are packed now, for this call.
void run_jobs(const ConvPlan& plan, const ConvKernels& kernel, const void* weights, char* workspace,
              const Parallel& parallel) {
  const int64_t blocks = std::clamp<int64_t>(*plan.p.active.count, 0, plan.p.active.capacity);
  if (!blocks) return;
  const int64_t threads = std::max(parallel.threads, 1), wanted = threads * kJobsPerThread;
  if (!weights) {
    ConvLayout used = plan;  // of the forms that the weights may have, the one that this call reads
    used.winograd = plan.way == ConvWay::kWinograd;
    used.narrow = plan.way == ConvWay::kNarrow;
    used.direct = !used.winograd && !used.narrow;
    pack(used, kernel, workspace + plan.weights_at, parallel);
    weights = workspace + plan.weights_at;
  }

  // Few tiles: split their output channels, so that every thread has work. Each tile reads all weights, so that small
  // blocks share one even then.
  const int64_t rects = blocks * plan.tiles[0] * plan.tiles[1];
  const int64_t sharing = std::min(ceil_div(kEnoughPixels, plan.tile[0] * plan.tile[1]), plan.rects_per_tile);
  int64_t tiles = ceil_div(rects, std::clamp(rects / wanted, sharing, plan.rects_per_tile));
  const int64_t per_tile = ceil_div(rects, tiles);
  tiles = ceil_div(rects, per_tile);
  const int64_t splits =
      std::clamp<int64_t>(ceil_div(wanted, tiles * plan.groups), ceil_div(plan.panels, plan.job_panels), plan.panels);
  const int64_t job_panels = ceil_div(plan.panels, splits);
  const int64_t jobs_per_group = ceil_div(plan.panels, job_panels), jobs_per_tile = plan.groups * jobs_per_group;

  // Worker w owns scratch area w and takes jobs until none is left: blocks differ in cost (borders, clipping), and a
  // pool may start its ranges late.
  int64_t* next = new (workspace) int64_t{0};
  parallel_for(parallel, threads, 1, [&](int64_t begin, int64_t) {
    char* scratch = workspace + plan.scratch_at + begin * plan.scratch_bytes;
    ConvRect* list = reinterpret_cast<ConvRect*>(scratch + plan.rects_at);
    ConvJob job = conv_job(plan, weights, scratch);
    job.rects = list;
    for (;;) {
      const int64_t j = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (j >= tiles * jobs_per_tile) return;
      const int64_t tile = j / jobs_per_tile, unit = j % jobs_per_tile;
      job.group = unit / jobs_per_group;
      job.first_panel = unit % jobs_per_group * job_panels;
      job.panels = std::min(job_panels, plan.panels - job.first_panel);
      job.rect_count = 0;
      for (int64_t r = tile * per_tile; r < std::min(rects, (tile + 1) * per_tile); ++r)
        job.rect_count += find_rect(plan, r, list + job.rect_count);
      if (job.rect_count) kernel.run_job(plan, job);
    }
  });
}

}  // namespace

namespace {

Status run_layer(const Conv2dParams& p, const QuantizedConv2dParams* quantized, void* workspace,
                 const Parallel& parallel) {
  const ConvKernels& kernel = kernels(p.weight, p.groups);
  ConvPlan plan = make_conv_plan(p, kernel.shape, p.packed, parallel.threads);
  plan.quantized = quantized;
  plan.per_unit = quantized && quantized->x_scale > 0 ? 1 / quantized->x_scale : 1;
  const void* packed = p.packed;
  if (packed) {
    SBNET_CHECK(!std::memcmp(packed, &plan.tag, sizeof(plan.tag)),
                "sparse_conv2d: packed: expected pack_conv_weight(weight, groups) of weight [%lld,%lld,%lld,%lld] %s, "
                "groups %d, got a pack of another shape, dtype, number of groups or processor",
                static_cast<long long>(p.weight.size[0]), static_cast<long long>(p.weight.size[1]),
                static_cast<long long>(p.weight.size[2]), static_cast<long long>(p.weight.size[3]),
                dtype_name(p.weight.dtype), p.groups);
    packed = static_cast<const char*>(packed) + kTagBytes;
  }
  if (p.x.size[0])  // blocks of no image, which a count may claim, may be of any size
    run_jobs(plan, kernel, packed, static_cast<char*>(workspace), parallel);
  zero_fringe(p.y, p.fringe, parallel);
  return ok_status();
}

// Kernels of int8 read and write no floats of 16 bits.
Status check_int8_floats(const QuantizedConv2dParams& p) {
  if (p.weight.dtype != DType::kI8) return ok_status();
  const auto check = [](const char* name, DType dtype) {
    SBNET_CHECK(dtype == DType::kI8 || dtype == DType::kF32,
                "sparse_conv2d_quantized: %s: dtype: expected int8 or float32 on a CPU, got %s", name,
                dtype_name(dtype));
    return ok_status();
  };
  SBNET_TRY(check("x", p.x.dtype));
  SBNET_TRY(check("out", p.y.dtype));
  return p.residual.data ? check("residual", p.residual.dtype) : ok_status();
}

}  // namespace

int64_t conv_workspace_bytes(const Conv2dParams& p, int32_t threads) {
  return make_conv_plan(p, kernels(p.weight, p.groups).shape, p.packed, threads).total_bytes;
}

void run_conv(const Conv2dParams& p, void* workspace, const Parallel& parallel) {
  const ConvKernels& kernel = kernels(p.weight, p.groups);
  run_jobs(make_conv_plan(p, kernel.shape, false, parallel.threads), kernel, nullptr, static_cast<char*>(workspace),
           parallel);
}

PanelShape panel_shape() {
  const ConvShape& shape = float_kernels().shape;
  return {shape.lanes, shape.lanes * shape.vectors};
}

namespace {

ConvPlan make_panel_plan(const Conv2dParams& p, int64_t panels, int32_t threads) {
  ConvPlan plan = make_conv_plan(p, float_kernels().shape, true, threads);
  plan.panels = plan.job_panels = panels;  // one after the other: each job transforms its inputs once
  return plan;
}

}  // namespace

bool suits_panels(const Conv2dParams& p) { return make_panel_plan(p, 1, 1).way == ConvWay::kWinograd; }

int64_t panel_conv_workspace_bytes(const Conv2dParams& p, int64_t panels, int32_t threads) {
  return make_panel_plan(p, panels, threads).total_bytes;
}

void run_panel_conv(const Conv2dParams& p, const WinogradPanel* panels, int64_t count, void* workspace,
                    const Parallel& parallel) {
  const ConvKernels& kernel = float_kernels();
  parallel_for(parallel, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernel.pack_panel(panels[i], p.x.dtype);
  });
  ConvPlan plan = make_panel_plan(p, count, parallel.threads);
  plan.block_panels = panels;
  run_jobs(plan, kernel, panels, static_cast<char*>(workspace), parallel);
}

}  // namespace sbnet

extern "C" sbnet::Status sbnet_pack_conv_weight_cpu(const sbnet::ConvPackParams* p, void* packed,
                                                    const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  if (p->weight.dtype == sbnet::DType::kF8) return sbnet::ok_status();
  const sbnet::ConvKernels& kernel = sbnet::kernels(p->weight, p->groups);
  const sbnet::ConvLayout layout = sbnet::make_conv_layout(p->weight, p->groups, kernel.shape);
  SBNET_CHECK(sbnet::kTagBytes + layout.bytes <= sbnet::packed_bytes(*p),
              "pack_conv_weight: packed (a bug): expected at most the %lld bytes of packed_bytes(), got %lld",
              static_cast<long long>(sbnet::packed_bytes(*p)), static_cast<long long>(sbnet::kTagBytes + layout.bytes));
  std::memcpy(packed, &layout.tag, sizeof(layout.tag));
  sbnet::pack(layout, kernel, static_cast<char*>(packed) + sbnet::kTagBytes, *parallel);
  return sbnet::ok_status();
}

int64_t sbnet_sparse_conv2d_workspace_bytes_cpu(const sbnet::Conv2dParams* p, int32_t threads) {
  return sbnet::validate(*p).ok() ? sbnet::conv_workspace_bytes(*p, threads) : 0;
}

sbnet::Status sbnet_sparse_conv2d_cpu(const sbnet::Conv2dParams* p, void* workspace, const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  return sbnet::run_layer(*p, nullptr, workspace, *parallel);
}

int64_t sbnet_sparse_conv2d_quantized_workspace_bytes_cpu(const sbnet::QuantizedConv2dParams* p, int32_t threads) {
  if (!sbnet::validate(*p).ok() || !sbnet::check_int8_floats(*p).ok()) return 0;
  if (p->weight.dtype == sbnet::DType::kF8) return sbnet::float8_conv_workspace_bytes(*p, threads);
  return sbnet::conv_workspace_bytes(*p, threads);
}

sbnet::Status sbnet_sparse_conv2d_quantized_cpu(const sbnet::QuantizedConv2dParams* p, void* workspace,
                                                const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  if (p->weight.dtype == sbnet::DType::kF8) {
    sbnet::run_float8_conv(*p, workspace, *parallel);
    sbnet::zero_fringe(p->y, p->fringe, *parallel);
    return sbnet::ok_status();
  }
  SBNET_TRY(sbnet::check_int8_floats(*p));
  return sbnet::named("sparse_conv2d_quantized", sbnet::run_layer(*p, p, workspace, *parallel));
}
