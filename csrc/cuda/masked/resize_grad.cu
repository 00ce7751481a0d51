// sparse_resize2d_grad on CUDA: a thread takes a pixel of dx and a word of channels, and gathers from the outputs that
// read the pixel.
#include "core/masked/resize_grad.h"
#include "cuda/masked/plane_map.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_resize2d_grad";

struct ResizeGradPlan {
  ResizeReaders row, column;
  FastDiv block[2];  // of dy's grid
};

template <class T, int kN, int kTaps>
__device__ __forceinline__ Word<T, kN> gather(const ResizeGradParams& p, const ResizeGradPlan& plan,
                                              const PlanePixel& at, int64_t channel) {
  const BlockGrid& grid = p.read_grid;
  const int32_t* const map = p.read_map + int64_t{at.n} * grid.count[0] * grid.count[1];
  const T* const dy = static_cast<const T*>(p.x.data) + at.n * p.x.stride[0] + channel * p.x.stride[1];
  // The columns of an upsampling to twice the side, or less, once for all rows, so that their loads are under way
  // together; `more` follow them.
  constexpr int kHeld = 2 * kTaps;
  const int first = plan.column.first<kTaps>(at.column);
  float held[kHeld] = {};
  int block[kHeld];
  bool more = true;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (more) more = plan.column.weight<kTaps>(first + k, at.column, &held[k]);
    block[k] = static_cast<int>(plan.block[1].quotient(first + k));
  }
  float sums[kN] = {}, down, across;
  for (int o = plan.row.first<kTaps>(at.row); plan.row.weight<kTaps>(o, at.row, &down); ++o) {
    if (down == 0.f) continue;
    const int32_t* const blocks = map + static_cast<int>(plan.block[0].quotient(o)) * grid.count[1];
    const T* const from = dy + o * p.x.stride[2];
    float of_row[kN] = {};  // by itself: many numbers added one after the other lose digits
    const auto add = [&](float weight, const Word<T, kN>& in) {
#pragma unroll
      for (int e = 0; e < kN; ++e) of_row[e] = fmaf(weight, to_float(in.channel[e]), of_row[e]);
    };
    const auto read = [&](int q) { return *reinterpret_cast<const Word<T, kN>*>(from + q * p.x.stride[3]); };
    Word<T, kN> in[kHeld];
    bool taken[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      taken[k] = held[k] != 0.f && blocks[block[k]] >= 0;
      if (taken[k]) in[k] = read(first + k);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (taken[k]) add(held[k], in[k]);
    for (int q = first + kHeld; more && plan.column.weight<kTaps>(q, at.column, &across); ++q)
      if (across != 0.f && blocks[plan.block[1].quotient(q)] >= 0) add(across, read(q));
#pragma unroll
    for (int e = 0; e < kN; ++e) sums[e] = fmaf(down, of_row[e], sums[e]);
  }
  Word<T, kN> out;
#pragma unroll
  for (int e = 0; e < kN; ++e) out.channel[e] = from_float<T>(sums[e]);
  return out;
}

template <class T, int kN, int kTaps>
__global__ void __launch_bounds__(kPixelThreads)
    resize_grad_list_kernel(const __grid_constant__ ResizeGradParams p, const __grid_constant__ PixelPlan pixels,
                            const __grid_constant__ ResizeGradPlan plan) {
  for_pixels<T>(p, pixels, [&](int n, int row, int column, int word) {
    const PlanePixel at = {n, row, column, true};
    const int64_t channel = int64_t{word} * kN;
    *word_at<T, kN>(p.y, at, channel) = gather<T, kN, kTaps>(p, plan, at, channel);
  });
}

template <class T, int kN, int kTaps>
__global__ void __launch_bounds__(kPlaneThreads)
    resize_grad_kernel(const __grid_constant__ ResizeGradParams p, const __grid_constant__ PlaneMap map,
                       const __grid_constant__ ResizeGradPlan plan) {
  grid_dependency_wait();
  grid_dependency_release();
  int64_t first = 0;
  for_plane<kN>(
      map, [&](int64_t channel) { first = channel; },
      [&](const PlanePixel& at) { return gather<T, kN, kTaps>(p, plan, at, first); },
      [&](const PlanePixel& at, const Word<T, kN>& found) { *word_at<T, kN>(p.y, at, first) = found; });
}

template <class T, int kN, int kTaps>
Status launch(const ResizeGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const ResizeParams forward = p.forward();
  const ResizeGradPlan plan = {ResizeReaders(forward, 0),
                               ResizeReaders(forward, 1),
                               {FastDiv(p.read_grid.size[0]), FastDiv(p.read_grid.size[1])}};
  return p.active.given() ? launch_pixels<resize_grad_list_kernel<T, kN, kTaps>>(kOp, p, kN, device, stream, plan)
                          : launch_plane<kN>(kOp, resize_grad_kernel<T, kN, kTaps>, p, device, stream, plan);
}

template <class T, int kN>
Status launch_mode(const ResizeGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.mode == ResizeMode::kBicubic) return launch<T, kN, 4>(p, device, stream);
  return p.mode == ResizeMode::kBilinear ? launch<T, kN, 2>(p, device, stream) : launch<T, kN, 1>(p, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_resize2d_grad_cuda(const sbnet::ResizeGradParams* params, void* stream) {
  using namespace sbnet;
  const ResizeGradParams& p = *params;
  SBNET_TRY(validate(p));
  if (p.active.given() ? writes_nothing(p) : !p.y.size[0] || !p.y.size[1]) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_dtype(p.y.dtype, [&](auto t) {
    using T = decltype(t);
    return words_of_channels<T>(p) ? launch_mode<T, kLanes<T>>(p, device, static_cast<cudaStream_t>(stream))
                                   : launch_mode<T, 1>(p, device, static_cast<cudaStream_t>(stream));
  });
}
