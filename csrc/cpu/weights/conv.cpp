// Convolutions with block-sparse weights on the CPU: checks, copies, tasks. The arithmetic is in conv_fma.h.
#include "core/weights/conv.h"

#include <algorithm>
#include <new>

#include "core/by_dtype.h"
#include "cpu/simd/half.h"
#include "cpu/simd/isa.h"
#include "cpu/weights/arena.h"
#include "cpu/weights/conv_kernels.h"
#include "cpu/weights/conv_winograd.h"

namespace sbnet {
namespace {

constexpr const char* kConv = "blocksparse_conv";
constexpr const char* kWeightGrad = "blocksparse_conv_weight_grad";
constexpr int64_t kTasksPerThread = 4;

const BlocksparseConvKernels& kernels() {
#if defined(__x86_64__)
  const Isa isa = chosen_isa();
  if (isa >= Isa::kAvx512) return kBlocksparseConvKernelsAvx512;
  if (isa >= Isa::kAvx2) return kBlocksparseConvKernelsAvx2;
#endif
  return kBlocksparseConvKernelsGeneric;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A tensor as float32 with its channels side by side.
struct Pixels {
  const float* data;
  int64_t stride[5];
  bool copied;

  Pixels(const VolumeView& t, Arena& arena) : data(static_cast<const float*>(t.data)) {
    copied = t.dtype != DType::kF32 || (t.stride[1] != 1 && t.size[1] > 1);
    std::copy_n(t.stride, 5, stride);
    if (!copied) return;
    stride[1] = 1, stride[4] = t.size[1];
    stride[3] = stride[4] * t.size[4], stride[2] = stride[3] * t.size[3], stride[0] = stride[2] * t.size[2];
    data = arena.take<float>(stride[0] * t.size[0]);
  }
  const float* at(const VolumePosition& p) const {
    return data + p.n * stride[0] + p.at[0] * stride[2] + p.at[1] * stride[3] + p.at[2] * stride[4];
  }
  void fill(const VolumeView& t, const Parallel& parallel) const {
    if (!copied) return;
    const int64_t W = t.size[4], C = t.size[1], rows = t.size[0] * t.size[2] * t.size[3];
    float* const to = const_cast<float*>(data);
    by_dtype<Half, BFloat16>(t.dtype, [&](auto type) {
      using T = decltype(type);
      parallel_for(parallel, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(W * C, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       const int64_t plane = row / t.size[3];
                       const T* from = static_cast<const T*>(t.data) + plane / t.size[2] * t.stride[0] +
                                       plane % t.size[2] * t.stride[2] + row % t.size[3] * t.stride[3];
                       for (int64_t w0 = 0; w0 < W; w0 += 16)  // 16 pixels: the lines that they lie in stay
                         for (int64_t c = 0; c < C; ++c)
                           for (int64_t w = w0; w < std::min(W, w0 + 16); ++w)
                             to[(row * W + w) * C + c] = to_float(from[w * t.stride[4] + c * t.stride[1]]);
                     }
                   });
    });
  }
};

// Workers with a scratch area each take tasks until none is left: groups differ in work.
template <class F>
void run_tasks(int64_t tasks, int64_t* next, char* scratch, int64_t scratch_bytes, const Parallel& parallel,
               const F& body) {
  new (next) int64_t{0};
  parallel_for(parallel, std::max(parallel.threads, 1), 1, [&](int64_t begin, int64_t) {
    for (;;) {
      const int64_t task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      body(task, scratch + begin * scratch_bytes);
    }
  });
}

// The position that stands at place i: those of a transposed convolution by their phase along the last axis, so that
// neighbours read the same taps.
VolumePosition ordered_position(const BlocksparseConvParams& p, int64_t i) {
  VolumePosition at = position_of(p.y, p.active, i);
  const int64_t stride = p.geometry.stride[2], size = p.y.size[4];
  if (!p.transposed || stride == 1 || p.active.given()) return at;
  const int64_t shorter = size / stride, longer = shorter + 1, rest = size % stride, q = at.at[2];
  at.at[2] = q < rest * longer ? q / longer + q % longer * stride
                               : rest + (q - rest * longer) / shorter + (q - rest * longer) % shorter * stride;
  return at;
}

int64_t position_count(const BlocksparseConvParams& p) {
  if (!p.active.given()) return position_capacity(p.y, p.active);
  return std::clamp<int64_t>(*p.active.count, 0, p.active.capacity) * p.active.grid.size[0] * p.active.grid.size[1];
}

struct ConvScratch {
  const float** source;
  int64_t* out;
  float* bias;
  ConvScratch(const BlocksparseConvParams& p, Arena& arena)
      : source(arena.take<const float*>(p.layout.shape.taps * kConvPositions)),
        out(arena.take<int64_t>(kConvPositions)),
        bias(arena.take<float>(kConvGroup)) {}
};

struct ConvPlan {
  Arena arena;
  int64_t* next;
  Pixels x;
  float* zeros;
  ConvEntry* entries;
  float* weights;
  char* scratch;
  int64_t scratch_bytes;

  // Weights as packed: those of a block once for each group of its output channels.
  static int64_t packed(const BlocksparseConvParams& p) {
    const BlocksparseConvLayout& layout = p.layout;
    int64_t inputs = 0;
    for (int64_t e = 0; e < layout.shape.entries[p.to()]; ++e)
      inputs += conv_block(layout, layout.side[p.to()].block[e]).count[p.from()];
    return inputs * layout.shape.taps * kConvGroup;
  }
  ConvPlan(const BlocksparseConvParams& p, char* base, int32_t threads)
      : arena{base},
        next(arena.take<int64_t>(1)),
        x(p.x, arena),
        zeros(arena.take<float>(p.x.size[1])),
        entries(arena.take<ConvEntry>(p.layout.shape.entries[p.to()])),
        weights(arena.take<float>(packed(p))) {
    Arena one = {nullptr};
    const ConvScratch measured(p, one);
    static_cast<void>(measured);
    scratch_bytes = one.used;
    scratch = arena.take<char>(scratch_bytes * std::max(threads, 1));
  }
};

// Entry e of the side that is written: [tap][input][kConvGroup], zeros where the group has fewer channels.
template <class T>
void pack_entry(const BlocksparseConvParams& p, int64_t e, float* to) {
  const BlocksparseConvSide& side = p.layout.side[p.to()];
  const BlocksparseConvBlock block = conv_block(p.layout, side.block[e]);
  const int64_t taps = p.layout.shape.taps, inputs = block.count[p.from()], filter_inputs = block.count[1];
  const T* weight = static_cast<const T*>(p.weight) + block.weight;
  for (int64_t t = 0; t < taps; ++t)
    for (int64_t i = 0; i < inputs; ++i, to += kConvGroup)
      for (int64_t j = 0; j < kConvGroup; ++j) {
        const int64_t o = side.position[e * kConvGroup + j];
        const int64_t at = p.transposed ? i * filter_inputs + o : o * filter_inputs + i;
        to[j] = o < 0 ? 0.f : to_float(weight[at * taps + t]);
      }
}

void pack_weights(const BlocksparseConvParams& p, const ConvPlan& plan, const Parallel& parallel) {
  const BlocksparseConvSide& side = p.layout.side[p.to()];
  const int64_t entries = p.layout.shape.entries[p.to()];
  const float* at = plan.weights;
  for (int64_t e = 0; e < entries; ++e) {
    const BlocksparseConvBlock block = conv_block(p.layout, side.block[e]);
    plan.entries[e] = {block.list[p.from()], block.count[p.from()], at};
    at += block.count[p.from()] * p.layout.shape.taps * kConvGroup;
  }
  parallel_for(parallel, entries, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e)
      by_dtype<Half, BFloat16>(
          p.x.dtype, [&](auto type) { pack_entry<decltype(type)>(p, e, const_cast<float*>(plan.entries[e].weight)); });
  });
}

// Where the taps of the positions from `first` on read, and where the positions are written.
void list_sources(const BlocksparseConvParams& p, const ConvPlan& plan, int64_t first, int64_t count,
                  const ConvScratch& scratch) {
  const ConvGeometry& g = p.geometry;
  for (int64_t i = 0; i < count; ++i) {
    const VolumePosition to = ordered_position(p, first + i);
    scratch.out[i] = to.n < 0 ? -1 : volume_offset(p.y, to);
    const float** source = scratch.source + i;
    for (int64_t t = 0; t < g.kernel[0]; ++t)
      for (int64_t r = 0; r < g.kernel[1]; ++r)
        for (int64_t s = 0; s < g.kernel[2]; ++s, source += kConvPositions) {
          VolumePosition from = {to.n, {}};
          const int64_t tap[3] = {t, r, s};
          bool inside = to.n >= 0;
          for (int d = 0; d < 3; ++d) {
            from.at[d] = conv_source(g, p.transposed, d, to.at[d], tap[d], p.x.size[2 + d]);
            inside = inside && from.at[d] >= 0;
          }
          *source = inside ? plan.x.at(from) : plan.zeros;
        }
  }
}

void load_bias(const BlocksparseConvParams& p, const int32_t* channels, int64_t width, float* bias) {
  std::fill_n(bias, kConvGroup, 0.f);
  if (!p.bias) return;
  by_dtype<Half, BFloat16>(p.bias_dtype, [&](auto type) {
    for (int64_t k = 0; k < width; ++k) bias[k] = to_float(static_cast<const decltype(type)*>(p.bias)[channels[k]]);
  });
}

void convolve(const BlocksparseConvParams& p, char* workspace, const Parallel& parallel) {
  const int64_t positions = position_count(p);
  if (!positions) return;
  const ConvPlan plan(p, workspace, parallel.threads);
  plan.x.fill(p.x, parallel);
  std::fill_n(plan.zeros, p.x.size[1], 0.f);
  pack_weights(p, plan, parallel);
  const BlocksparseConvSide& side = p.layout.side[p.to()];
  const int64_t groups = p.layout.shape.groups[p.to()], chunks = ceil_div(positions, kConvPositions);
  const int64_t wanted = std::max(parallel.threads, 1) * kTasksPerThread;
  const int64_t per_task = ceil_div(groups, std::clamp<int64_t>(ceil_div(wanted, chunks), 1, groups));
  const int64_t parts = ceil_div(groups, per_task);
  run_tasks(chunks * parts, plan.next, plan.scratch, plan.scratch_bytes, parallel, [&](int64_t t, char* area) {
    Arena arena = {area};
    const ConvScratch scratch(p, arena);
    const int64_t first = t / parts * kConvPositions;
    BlocksparseConvTask task = {};
    task.taps = p.layout.shape.taps;
    task.positions = std::min(kConvPositions, positions - first);
    list_sources(p, plan, first, task.positions, scratch);
    task.source = scratch.source, task.zeros = plan.zeros, task.out = scratch.out;
    task.channel_stride = p.y.stride[1];
    task.bias = scratch.bias;
    for (int64_t g = t % parts * per_task; g < std::min(groups, (t % parts + 1) * per_task); ++g) {
      task.entries = plan.entries + side.start[g];
      task.entry_count = side.start[g + 1] - side.start[g];
      task.channels = side.channels + g * kConvGroup;
      task.width = 0;
      while (task.width < kConvGroup && task.channels[task.width] >= 0) ++task.width;
      load_bias(p, task.channels, task.width, scratch.bias);
      kernels().multiply(p.y.data, p.y.dtype, p.activation, p.activation_param, task);
    }
  });
}

// ---- Weight gradient: a task is one tap of one block, whose positions go by in chunks.

struct GradScratch {
  const float **x, **dy;
  float *left, *right, *sums;
  GradScratch(const int64_t widest[2], Arena& arena)
      : x(arena.take<const float*>(kConvDepth)),
        dy(arena.take<const float*>(kConvDepth)),
        left(arena.take<float>(kConvDepth * widest[1])),
        right(arena.take<float>(kConvDepth * widest[0])),
        sums(arena.take<float>(widest[0] * widest[1])) {}
};

struct GradPlan {
  Arena arena;
  int64_t* next;
  Pixels x, dy;
  int64_t widest[2] = {0, 0};  // channels of the largest blocks, padded
  char* scratch;
  int64_t scratch_bytes;

  GradPlan(const BlocksparseConvWeightGradParams& p, char* base, int32_t threads)
      : arena{base}, next(arena.take<int64_t>(1)), x(p.x, arena), dy(p.dy, arena) {
    for (int64_t b = 0; b < p.layout.shape.blocks; ++b)
      for (int side = 0; side < 2; ++side)
        widest[side] = std::max<int64_t>(widest[side], padded_channels(conv_block(p.layout, b).count[side]));
    Arena one = {nullptr};
    const GradScratch measured(widest, one);
    static_cast<void>(measured);
    scratch_bytes = one.used;
    scratch = arena.take<char>(scratch_bytes * std::max(threads, 1));
  }
};

void weight_grad(const BlocksparseConvWeightGradParams& p, char* workspace, const Parallel& parallel) {
  const GradPlan plan(p, workspace, parallel.threads);
  plan.x.fill(p.x, parallel);
  plan.dy.fill(p.dy, parallel);
  const ConvGeometry& g = p.geometry;
  const int64_t taps = p.layout.shape.taps, positions = position_capacity(p.dy, {});
  run_tasks(p.layout.shape.blocks * taps, plan.next, plan.scratch, plan.scratch_bytes, parallel,
            [&](int64_t index, char* area) {
              Arena arena = {area};
              const GradScratch scratch(plan.widest, arena);
              const BlocksparseConvBlock block = conv_block(p.layout, index / taps);
              const int64_t t = index % taps, in = block.count[1], out = block.count[0];
              const int64_t width = padded_channels(out);
              const int64_t tap[3] = {t / (g.kernel[1] * g.kernel[2]), t / g.kernel[2] % g.kernel[1], t % g.kernel[2]};
              std::fill_n(scratch.sums, padded_channels(in) * width, 0.f);
              ConvWeightGradTask task = {0,   scratch.x,    scratch.dy,    block.list[1], block.list[0], in,
                                         out, scratch.left, scratch.right, scratch.sums,  true};
              for (int64_t i = 0; i < positions; ++i) {
                const VolumePosition at = position_of(p.dy, {}, i);
                VolumePosition from = {at.n, {}};
                bool inside = true;
                for (int d = 0; d < 3; ++d) {
                  from.at[d] = conv_source(g, false, d, at.at[d], tap[d], p.x.size[2 + d]);
                  inside = inside && from.at[d] >= 0;
                }
                if (inside) {
                  scratch.x[task.positions] = plan.x.at(from);
                  scratch.dy[task.positions++] = plan.dy.at(at);
                }
                if (task.positions < kConvDepth && (i + 1 < positions || !task.positions)) continue;
                kernels().weight_grad(task);
                task.positions = 0;
                task.first = false;
              }
              by_dtype<Half, BFloat16>(p.x.dtype, [&](auto type) {
                using T = decltype(type);
                T* dw = static_cast<T*>(p.dw) + block.weight;
                for (int64_t k = 0; k < out; ++k)
                  for (int64_t c = 0; c < in; ++c)
                    dw[(k * in + c) * taps + t] = from_float<T>(scratch.sums[c * width + k]);
              });
            });
}

}  // namespace
}  // namespace sbnet

extern "C" {

int64_t sbnet_blocksparse_conv_workspace_bytes_cpu(const sbnet::BlocksparseConvParams* p, int32_t threads) {
  if (!sbnet::validate(*p).ok() || !sbnet::check_tables(sbnet::kConv, p->layout).ok()) return 0;
  if (sbnet::suits_winograd(*p)) return sbnet::winograd_workspace_bytes(*p, threads);
  return sbnet::ConvPlan(*p, nullptr, threads).arena.used;
}

sbnet::Status sbnet_blocksparse_conv_cpu(const sbnet::BlocksparseConvParams* p, void* workspace,
                                         const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  SBNET_TRY(sbnet::check_tables(sbnet::kConv, p->layout));
  if (sbnet::suits_winograd(*p))
    sbnet::convolve_by_winograd(*p, static_cast<char*>(workspace), *parallel);
  else
    sbnet::convolve(*p, static_cast<char*>(workspace), *parallel);
  return sbnet::ok_status();
}

int64_t sbnet_blocksparse_conv_weight_grad_workspace_bytes_cpu(const sbnet::BlocksparseConvWeightGradParams* p,
                                                               int32_t threads) {
  if (!sbnet::validate(*p).ok() || !sbnet::check_tables(sbnet::kWeightGrad, p->layout).ok()) return 0;
  return sbnet::GradPlan(*p, nullptr, threads).arena.used;
}

sbnet::Status sbnet_blocksparse_conv_weight_grad_cpu(const sbnet::BlocksparseConvWeightGradParams* p, void* workspace,
                                                     const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  SBNET_TRY(sbnet::check_tables(sbnet::kWeightGrad, p->layout));
  sbnet::weight_grad(*p, static_cast<char*>(workspace), *parallel);
  return sbnet::ok_status();
}
}
