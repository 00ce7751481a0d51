// sparse_conv2d_weight_grad on the CPU: a task is a part of the list and some channels; parts are added in order. How
// the list is cut depends on its length and the layer alone, so that the bits do not depend on the number of threads.
#include "core/masked/conv_grad.h"

#include <algorithm>
#include <cstring>

#include "core/by_dtype.h"
#include "cpu/masked/conv_grad_kernels.h"
#include "cpu/simd/half.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

constexpr int64_t kMostParts = 16, kPartPixels = 128, kMostPartBytes = 64 << 20;
constexpr int64_t kWantedTasks = 32;  // slices of channels are tasks, too: parts only where those are few
constexpr int64_t kLine = 16;         // floats

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a layer is cut into tasks.
struct Cut {
  int64_t taps, groups, group_inputs, group_outputs, input_slices, output_slices;
  int64_t block_pixels, tile_height, tile_width, patch_height, patch_width, most_tiles;
  int64_t slice_floats;  // sums of one slice of channels
  int64_t scratch_floats;
  bool lanewise;

  explicit Cut(const ConvWeightGradParams& params) {
    const Conv2dParams& p = params.conv;
    lanewise = is_lanewise(params);
    taps = p.weight.size[2] * p.weight.size[3];
    groups = lanewise ? 1 : p.groups;
    group_inputs = lanewise ? 1 : p.weight.size[1];
    group_outputs = p.weight.size[0] / groups;
    input_slices = ceil_div(group_inputs, kGradInputs);
    output_slices = ceil_div(group_outputs, kGradOutputs);
    const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
    const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
    block_pixels = std::max<int64_t>(height * width, 1);
    tile_width = std::min(width, kGradTileWidth);
    tile_height = std::min(height, kGradTilePixels / tile_width);
    patch_height = (tile_height - 1) * p.stride[0] + (p.weight.size[2] - 1) * p.dilation[0] + 1;
    patch_width = (tile_width - 1) * p.stride[1] + (p.weight.size[3] - 1) * p.dilation[1] + 1;
    const int64_t inputs = std::min(group_inputs, kGradInputs);
    const int64_t lanes = whole_lanes(std::min(group_outputs, kGradOutputs));
    slice_floats = (taps * inputs + 1) * lanes;  // and the biases
    const int64_t patch = patch_height * patch_width * (lanewise ? lanes : inputs);
    most_tiles = std::clamp<int64_t>(std::min(kGradTilePixels / std::max<int64_t>(tile_height * tile_width, 1),
                                              kGradPatchFloats / std::max<int64_t>(patch, 1)),
                                     1, kGradTilePixels);
    scratch_floats = kGradTilePixels * lanes + most_tiles * patch;
    scratch_floats = ceil_div(scratch_floats, kLine) * kLine;
  }
  int64_t slices() const { return groups * input_slices * output_slices; }
  int64_t parts(int64_t blocks) const {
    const int64_t room = kMostPartBytes / std::max<int64_t>(1, slices() * slice_floats * 4);
    const int64_t wanted = ceil_div(kWantedTasks, std::max<int64_t>(1, slices()));
    return std::max<int64_t>(1, std::min({kMostParts, wanted, ceil_div(blocks * block_pixels, kPartPixels), room}));
  }
  // Sums of all parts; of each worker, where there is one part: it writes what it found at once.
  int64_t sums_floats(int64_t blocks, int64_t threads) const {
    const int64_t all = parts(blocks) > 1 ? parts(blocks) * slices() : 0;
    return ceil_div(std::max(all, threads) * slice_floats, kLine) * kLine;
  }
};

// What the parts of a slice found, as elements of the weight and of the bias. 16 by 16 channels at a time: of either
// side whole cache lines.
template <class T>
void write_slice(const ConvWeightGradParams& p, const Cut& cut, const ConvGradTask& t, int64_t input,
                 const float* sums) {
  constexpr int64_t kTile = 16;
  const int64_t lanes = whole_lanes(t.outputs), columns = p.conv.weight.size[3], step = p.weight.stride[1];
  for (int64_t k0 = 0; k0 < t.outputs; k0 += kTile)
    for (int64_t tap = 0; tap < cut.taps; ++tap)
      for (int64_t c0 = 0; c0 < t.inputs; c0 += kTile) {
        T tile[kTile][kTile];
        const int64_t outputs = std::min(kTile, t.outputs - k0), inputs = std::min(kTile, t.inputs - c0);
        const float* const from = sums + (tap * t.inputs + c0) * lanes + k0;
        for (int64_t c = 0; c < inputs; ++c)
          for (int64_t k = 0; k < kTile; ++k) tile[k][c] = from_float<T>(from[c * lanes + k]);
        T* to = static_cast<T*>(p.weight.data) + (t.output + k0) * p.weight.stride[0] + (input + c0) * step +
                tap / columns * p.weight.stride[2] + tap % columns * p.weight.stride[3];
        for (int64_t k = 0; k < outputs; ++k, to += p.weight.stride[0])
          if (step == 1)
            std::copy_n(tile[k], inputs, to);
          else
            for (int64_t c = 0; c < inputs; ++c) to[c * step] = tile[k][c];
      }
  if (p.bias && !input) std::copy_n(sums + cut.taps * t.inputs * lanes, t.outputs, p.bias + t.output);
}

int64_t workspace_bytes(const ConvWeightGradParams& p, int32_t threads) {
  const Cut cut(p);
  const int64_t workers = std::max(threads, 1);
  return 4 * (cut.sums_floats(p.conv.active.capacity, workers) + workers * cut.scratch_floats);
}

void weight_grad(const ConvWeightGradParams& p, void* workspace, const Parallel* parallel) {
  const Cut cut(p);
  const ActiveView& active = p.conv.active;
  const int64_t blocks = std::clamp<int64_t>(*active.count, 0, active.capacity);
  const int64_t parts = cut.parts(blocks), tasks = parts * cut.slices();
  float* const sums = static_cast<float*>(workspace);
  float* const scratch = sums + cut.sums_floats(blocks, std::max<int64_t>(parallel->threads, 1));
#if defined(__x86_64__)
  const ConvGradFunction run = chosen_isa() >= Isa::kAvx512 ? kConvGradAvx512
                               : chosen_isa() >= Isa::kAvx2 ? kConvGradAvx2
                                                            : kConvGradGeneric;
#else
  const ConvGradFunction run = kConvGradGeneric;
#endif
  // Slice s of all parts, without what is a part's own.
  const auto task_of = [&](int64_t s) {
    ConvGradTask t = {};
    t.p = &p;
    const int64_t output = s % cut.output_slices, input = s / cut.output_slices % cut.input_slices;
    const int64_t group = s / (cut.output_slices * cut.input_slices);
    t.output = group * cut.group_outputs + output * kGradOutputs;
    t.outputs = std::min(kGradOutputs, (group + 1) * cut.group_outputs - t.output);
    t.input = group * cut.group_inputs + input * kGradInputs;
    t.inputs = std::min(kGradInputs, (group + 1) * cut.group_inputs - t.input);
    t.tile_height = cut.tile_height, t.tile_width = cut.tile_width;
    t.patch_height = cut.patch_height, t.patch_width = cut.patch_width, t.most_tiles = cut.most_tiles;
    return t;
  };
  const auto write = [&](const ConvGradTask& t, const float* found) {
    by_dtype<Half, BFloat16>(p.weight.dtype,
                             [&](auto e) { write_slice<decltype(e)>(p, cut, t, t.input % cut.group_inputs, found); });
  };
  const int64_t workers = std::clamp<int64_t>(parallel->threads, 1, std::max<int64_t>(tasks, 1));
  parallel_for(*parallel, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t task = worker; task < tasks; task += workers) {
        const int64_t s = task / parts, part = task % parts;
        ConvGradTask t = task_of(s);
        t.begin = blocks * part / parts, t.end = blocks * (part + 1) / parts;
        t.sums = sums + (parts > 1 ? task : worker) * cut.slice_floats;
        t.scratch = scratch + worker * cut.scratch_floats;
        const int64_t lanes = whole_lanes(t.outputs);
        std::memset(t.sums, 0, sizeof(float) * static_cast<size_t>((cut.taps * t.inputs + 1) * lanes));
        const bool first = t.input % cut.group_inputs == 0;  // biases once, not with every slice of inputs
        t.bias = p.bias && first ? t.sums + cut.taps * t.inputs * lanes : nullptr;
        run(t);
        if (parts == 1) write(t, t.sums);
      }
  });
  if (parts == 1) return;
  parallel_for(*parallel, cut.slices(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const ConvGradTask t = task_of(s);
      float* const own = sums + s * parts * cut.slice_floats;
      const int64_t floats = (cut.taps * t.inputs + 1) * whole_lanes(t.outputs);
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t k = 0; k < floats; ++k) own[k] += own[part * cut.slice_floats + k];
      write(t, own);
    }
  });
}

}  // namespace
}  // namespace sbnet

int64_t sbnet_sparse_conv2d_weight_grads_workspace_bytes_cpu(const sbnet::ConvWeightGradsParams* p, int32_t threads) {
  int64_t most = 0;
  for (int64_t k = 0; k < p->count; ++k) most = std::max(most, sbnet::workspace_bytes(p->layers[k], threads));
  return most;
}

sbnet::Status sbnet_sparse_conv2d_weight_grads_cpu(const sbnet::ConvWeightGradsParams* params, void* workspace,
                                                   const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*params));
  for (int64_t k = 0; k < params->count; ++k) weight_grad(params->layers[k], workspace, parallel);
  return ok_status();
}

namespace sbnet {
namespace {

void turn(const TurnWeightParams& p, const Parallel& parallel) {
  const int64_t K = p.weight.size[0], C = p.weight.size[1], R = p.weight.size[2], S = p.weight.size[3];
  const int64_t taps = R * S;
  if (!taps) return;
  by_dtype<Half, BFloat16>(p.weight.dtype, [&](auto from) {
    by_dtype<Half, BFloat16>(p.same.dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      To *const same = static_cast<To*>(p.same.data), *const turned = static_cast<To*>(p.turned.data);
      // 16 by 16 channels at a time: of each side whole cache lines.
      constexpr int64_t kTile = 16;
      const int64_t tiles = ceil_div(K, kTile) * ceil_div(C, kTile);
      parallel_for(parallel, taps * tiles, 1 + 64 / taps, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t tap = task % taps, tile = task / taps, first_c = tile % ceil_div(C, kTile) * kTile;
          const int64_t first_k = tile / ceil_div(C, kTile) * kTile, other = taps - 1 - tap;
          const From* const at =
              static_cast<const From*>(p.weight.data) + tap / S * p.weight.stride[2] + tap % S * p.weight.stride[3];
          // A tile by itself: rows of all three are often as far apart as a cache's sets repeat.
          To tile_of[kTile][kTile];
          const int64_t outputs = std::min(kTile, K - first_k), inputs = std::min(kTile, C - first_c);
          const int64_t step_k = p.weight.stride[0], step_c = p.weight.stride[1];
          for (int64_t k = 0; k < outputs; ++k)
            for (int64_t c = 0; c < inputs; ++c)
              tile_of[k][c] = from_float<To>(to_float(at[(first_k + k) * step_k + (first_c + c) * step_c]));
          for (int64_t k = 0; k < outputs; ++k)
            std::copy_n(tile_of[k], inputs, same + ((first_k + k) * taps + tap) * C + first_c);
          for (int64_t c = 0; c < inputs; ++c) {
            To* const to_c = turned + ((first_c + c) * taps + other) * K + first_k;
            for (int64_t k = 0; k < outputs; ++k) to_c[k] = tile_of[k][c];
          }
        }
      });
    });
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_turn_conv_weights_cpu(const sbnet::TurnWeightsParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*params));
  for (int64_t k = 0; k < params->count; ++k) turn(params->weights[k], *parallel);
  return ok_status();
}
