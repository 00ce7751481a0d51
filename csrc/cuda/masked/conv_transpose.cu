// sparse_conv_transpose2d on CUDA, where Hopper's kernel of all phases (sm90/conv/conv_transpose.cu) does not serve: a
// convolution of stride 1 for each phase of the output, which multiplies no zeros, by whatever kernel serves such a
// convolution; where the stride does not divide the blocks, or a phase has no taps, pixel by pixel.
// By rows (conv_rows.cu), up to four phases are one launch.
//   prepare_kernel  the phases' weights, in the order that convolutions read; zeros the fringe
//   pixel_kernel    a thread for each pixel and output channel
#include <algorithm>

#include "core/masked/conv_select.h"
#include "core/masked/conv_transpose.h"
#include "core/settled.h"
#include "cuda/by_dtype.cuh"
#include "cuda/capability.h"
#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/conv_run.cuh"
#include "cuda/masked/pixels.cuh"
#ifdef SBNET_SM90
#include "cuda/sm90/conv/conv.h"
#endif

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_conv_transpose2d";
constexpr int kThreads = 256, kPhases = kMaxTransposeStride * kMaxTransposeStride;

struct PrepareArgs {
  ConvTransposeParams p;
  FringePlan fringe;
  TransposePhase row[kMaxTransposeStride], column[kMaxTransposeStride];
  int64_t first[kPhases];  // where a phase's weights begin
  void* weights;
};

template <class T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ PrepareArgs a) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t threads = int64_t{gridDim.x} * kThreads, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  clear_fringe<T>(a.p, a.fringe, thread + blockIdx.y * threads, threads * gridDim.y);
  if (!a.weights) return;
  const int phase = blockIdx.y;
  const TransposePhase &row = a.row[phase / a.p.stride[1]], &column = a.column[phase % a.p.stride[1]];
  if (!row.side || !column.side) return;
  const TensorView& w = a.p.weight;
  const int64_t channels = a.p.x.size[1] / a.p.groups, taps = int64_t{row.taps} * column.taps;
  T* to = static_cast<T*>(a.weights) + a.first[phase];
  for (int64_t e = thread; e < a.p.y.size[1] * taps * channels; e += threads) {
    const int64_t c = e % channels, tap = e / channels % taps, k = e / channels / taps;
    const int64_t group = k / w.size[1], r = tap / column.taps, s = tap % column.taps;
    to[e] = static_cast<const T*>(w.data)[(group * channels + c) * w.stride[0] + (k - group * w.size[1]) * w.stride[1] +
                                          (row.last_tap - r * row.tap_step) * w.stride[2] +
                                          (column.last_tap - s * column.tap_step) * w.stride[3]];
  }
}

template <class T>
__device__ __forceinline__ void run_output(const ConvTransposeParams& p, int n, int row, int column, int64_t k) {
  const TensorView& w = p.weight;
  const int64_t channels = p.x.size[1] / p.groups, group = k / w.size[1];
  const T* x = static_cast<const T*>(p.x.data) + n * p.x.stride[0] + group * channels * p.x.stride[1];
  const T* taps =
      static_cast<const T*>(w.data) + group * channels * w.stride[0] + (k - group * w.size[1]) * w.stride[1];
  double sum = 0;
  for (int r = 0; r < w.size[2]; ++r) {
    const int64_t i = row + p.padding[0] - int64_t{r} * p.dilation[0];
    if (i < 0 || i % p.stride[0] || i / p.stride[0] >= p.x.size[2]) continue;
    for (int s = 0; s < w.size[3]; ++s) {
      const int64_t j = column + p.padding[1] - int64_t{s} * p.dilation[1];
      if (j < 0 || j % p.stride[1] || j / p.stride[1] >= p.x.size[3]) continue;
      const T* pixel = x + i / p.stride[0] * p.x.stride[2] + j / p.stride[1] * p.x.stride[3];
      const T* tap = taps + r * w.stride[2] + s * w.stride[3];
      for (int64_t c = 0; c < channels; ++c)
        sum += static_cast<double>(to_float(pixel[c * p.x.stride[1]])) * to_float(tap[c * w.stride[0]]);
    }
  }
  float v[1][1] = {{static_cast<float>(sum)}};
  if (p.bias) v[0][0] += number_at<T>(p.bias, p.bias_dtype, k);
  if (p.residual.data)
    v[0][0] +=
        to_float(static_cast<const T*>(p.residual.data)[n * p.residual.stride[0] + k * p.residual.stride[1] +
                                                        row * p.residual.stride[2] + column * p.residual.stride[3]]);
  activate_channels<T>(p, v, k, k + 1);
  static_cast<T*>(p.y.data)[n * p.y.stride[0] + k * p.y.stride[1] + row * p.y.stride[2] + column * p.y.stride[3]] =
      from_float<T>(v[0][0]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) pixel_kernel(const __grid_constant__ ConvTransposeParams p) {
  grid_dependency_wait();
  grid_dependency_release();
  const BlockGrid& grid = p.active.grid;
  const int64_t height = min(static_cast<int64_t>(grid.size[0]), p.y.size[2]);
  const int64_t width = min(static_cast<int64_t>(grid.size[1]), p.y.size[3]), K = p.y.size[1];
  const int64_t outputs = clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * height * width * K;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x; e < outputs; e += threads) {
    const int64_t k = e % K, pixel = e / K, within = pixel % (height * width);
    BlockIndex b;
    if (!load_block(p.active.indices, pixel / (height * width), static_cast<int>(p.y.size[0]), grid, &b)) continue;
    const int64_t row = int64_t{b.i} * grid.size[0] + within / width;
    const int64_t column = int64_t{b.j} * grid.size[1] + within % width;
    if (row < p.y.size[2] && column < p.y.size[3])
      run_output<T>(p, b.n, static_cast<int>(row), static_cast<int>(column), k);
  }
}

template <class T>
Status launch(const ConvTransposeParams& p, bool by_phases, void* workspace, const DeviceInfo& device,
              cudaStream_t stream) {
  const int64_t most = int64_t{device.sm_count} * 8;
  PrepareArgs a = {};
  a.p = p;
  a.fringe = FringePlan(p);
  a.weights = by_phases ? workspace : nullptr;
  int64_t at = 0, phases = 1, work = a.fringe.threads(p);
  if (by_phases) {
    phases = p.stride[0] * p.stride[1];
    for (int i = 0; i < p.stride[0]; ++i) a.row[i] = transpose_phase(p, 0, i);
    for (int j = 0; j < p.stride[1]; ++j) a.column[j] = transpose_phase(p, 1, j);
    for (int k = 0; k < phases; ++k) {
      const TransposePhase &row = a.row[k / p.stride[1]], &column = a.column[k % p.stride[1]];
      a.first[k] = at;
      if (row.side && column.side) at += p.y.size[1] * (p.x.size[1] / p.groups) * row.taps * column.taps;
    }
    work = std::max(work, transpose_weights(p));
  }
  if (work) {
    const int64_t ctas = std::clamp<int64_t>(work / phases / kThreads + 1, 1, most);
    SBNET_CUDA_TRY(kOp, launch_dependent(device, prepare_kernel<T>,
                                         dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(phases)),
                                         dim3(kThreads), 0, stream, a));
  }
  if (!p.active.capacity) return ok_status();
  const Unsettled weights_are_made_here;
  if (by_phases) {
    Conv2dParams convs[kPhases];
    int count = 0;
    for (int k = 0; k < phases; ++k) {
      const int i = k / p.stride[1], j = k % p.stride[1];
      if (!a.row[i].side || !a.column[j].side) continue;
      convs[count++] = phase_conv(p, a.row[i], a.column[j], i, j, static_cast<T*>(workspace) + a.first[k]);
    }
    const bool rows = count <= portable::kMostPhases && std::all_of(convs, convs + count, [&](const Conv2dParams& c) {
                        return select_conv(c, select_capability(device)).kernel == ConvKernel::kRows;
                      });
    if (rows) return count ? portable::launch_rows_phases(convs, count, device, stream) : ok_status();
    for (int k = 0; k < count; ++k) SBNET_TRY(run_conv(convs[k], device, stream));
    return ok_status();
  }
  const int64_t pixels =
      std::min<int64_t>(p.active.grid.size[0], p.y.size[2]) * std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  const double outputs = static_cast<double>(p.active.capacity) * pixels * p.y.size[1];
  SBNET_CHECK(outputs < 1e18, "%s: active: expected room for less than 10^18 outputs, got %.0f", kOp, outputs);
  const int64_t ctas = std::clamp<int64_t>(static_cast<int64_t>(outputs / kThreads) + 1, 1, most);
  SBNET_CUDA_TRY(
      kOp, launch_dependent(device, pixel_kernel<T>, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0, stream, p));
  return ok_status();
}

bool runs_in_one_launch(const ConvTransposeParams& p, const DeviceInfo& device) {
  return select_capability(device) == 90 && !hopper_transpose_declines(p);
}

}  // namespace
}  // namespace sbnet

int64_t sbnet_sparse_conv_transpose2d_workspace_bytes_cuda(const sbnet::ConvTransposeParams* params) {
  using namespace sbnet;
  const ConvTransposeParams& p = *params;
  DeviceInfo device;
  if (!validate(p).ok() || !runs_by_phases(p) || !current_device(kOp, &device).ok() || runs_in_one_launch(p, device))
    return 0;
  return transpose_weights(p) * dtype_size(p.x.dtype);
}

sbnet::Status sbnet_sparse_conv_transpose2d_cuda(const sbnet::ConvTransposeParams* params, void* workspace,
                                                 void* stream_handle) {
  using namespace sbnet;
  const ConvTransposeParams& p = *params;
  return run_layer(kOp, p, stream_handle, [&](const DeviceInfo& device, cudaStream_t stream) {
#ifdef SBNET_SM90
    if (runs_in_one_launch(p, device)) return sm90::conv_transpose(p, device, stream);
#endif
    const bool by_phases = runs_by_phases(p);
    return by_dtype(p.x.dtype, [&](auto t) { return launch<decltype(t)>(p, by_phases, workspace, device, stream); });
  });
}
