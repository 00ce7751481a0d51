// sparse_pointwise on CUDA: a thread runs the program on a word of channels. One kernel interprets every program: the
// steps are the same for all threads, so that their branches are uniform.
#include "core/masked/pointwise.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_pointwise";

struct RowParams : PointwiseParams {
  TensorView plane;  // y, whose pixels the fringe counts
};

SBNET_HOST_DEVICE inline const TensorView& fringe_plane(const RowParams& p) { return p.plane; }

// Pictures: where the channels of a pixel are no whole words and every tensor has the pixels of a row side by side, a
// row of pixels is a row of words, each of channels of more than one pixel.
template <class T>
RowParams rows_of_words(const PointwiseParams& p) {
  RowParams to;
  static_cast<PointwiseParams&>(to) = p;
  to.plane = p.y;
  const int64_t channels = p.y.size[1], row = p.y.size[3] * channels, block = p.active.grid.size[1] * channels;
  if (channels % kLanes<T> == 0 || row % kLanes<T> || block % kLanes<T> || block > INT32_MAX) return to;
  RowParams wide = to;
  const auto widen = [&](TensorView& t) {
    const bool one = t.stride[1] == 0 && t.stride[3] == 0;  // of a row, for all its pixels and channels
    const bool dense = (channels == 1 || t.stride[1] == 1) && (t.size[3] == 1 || t.stride[3] == channels);
    t.size[1] = kLanes<T>, t.size[3] = row / kLanes<T>;
    if (!one) t.stride[1] = 1, t.stride[3] = kLanes<T>;
    return one || (dense && channels_vectorize(t));
  };
  bool fits = widen(wide.x) && widen(wide.y) && wide.x.stride[1] == 1;
  for (TensorView& other : wide.other) fits = fits && (!other.data || widen(other));
  wide.active.grid.size[1] = static_cast<int32_t>(block / kLanes<T>);
  return fits ? wide : to;
}

struct WordLoads {
  bool whole[1 + kOperands];  // of x and the others: a word is one access
};

template <class T, int kN>
__device__ __forceinline__ void load(const TensorView& t, bool whole, int64_t at, float (&values)[kN]) {
  const T* from = static_cast<const T*>(t.data) + at;
  if (whole) {
    const Word<T, kN> word = *reinterpret_cast<const Word<T, kN>*>(from);
#pragma unroll
    for (int e = 0; e < kN; ++e) values[e] = to_float(word.channel[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kN; ++e) values[e] = to_float(from[e * t.stride[1]]);
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kPixelThreads)
    pointwise_kernel(const __grid_constant__ RowParams p, const __grid_constant__ PixelPlan plan,
                     const __grid_constant__ WordLoads loads) {
  for_pixels<T>(p, plan, [&](int n, int row, int column, int word) {
    const auto offset = [&](const TensorView& t) {
      return n * t.stride[0] + int64_t{word} * kN * t.stride[1] + row * t.stride[2] + column * t.stride[3];
    };
    float v[kN], o[kN] = {}, s[kN] = {}, t[kN] = {};
    load<T>(p.x, loads.whole[0], offset(p.x), v);
    for (int k = 0; k < p.steps; ++k) {
      const PointwiseStep step = p.step[k];
      const bool second = step.source == StepSource::kT;
      if (step.code == StepCode::kSave) {
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          s[e] = second ? s[e] : v[e];
          t[e] = second ? v[e] : t[e];
        }
        continue;
      }
      if (step.source >= StepSource::kS) {
#pragma unroll
        for (int e = 0; e < kN; ++e) o[e] = step.source == StepSource::kNumber ? step.p : second ? t[e] : s[e];
      } else {
        const int source = static_cast<int>(step.source);
        const TensorView& from = source ? p.other[source - 1] : p.x;
        load<T>(from, loads.whole[source], offset(from), o);
      }
      run_step<ScalarMath>(step, v, o);
    }
    Word<T, kN> out;
#pragma unroll
    for (int e = 0; e < kN; ++e) out.channel[e] = from_float<T>(v[e]);
    *reinterpret_cast<Word<T, kN>*>(static_cast<T*>(p.y.data) + offset(p.y)) = out;
  });
}

template <class T, int kN>
Status launch(const RowParams& p, const DeviceInfo& device, cudaStream_t stream) {
  WordLoads loads;
  loads.whole[0] = kN == 1 || channels_vectorize(p.x);
  for (int k = 0; k < kOperands; ++k)
    loads.whole[1 + k] = kN == 1 || (p.other[k].data && p.other[k].stride[1] == 1 && channels_vectorize(p.other[k]));
  return launch_pixels<pointwise_kernel<T, kN>>(kOp, p, kN, device, stream, loads);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pointwise_cuda(const sbnet::PointwiseParams* params, void* stream_handle) {
  using namespace sbnet;
  return run_layer_by_dtype(kOp, *params, stream_handle, [&](auto t, const DeviceInfo& device, auto stream) {
    using T = decltype(t);
    const RowParams p = rows_of_words<T>(*params);
    return words_of_channels<T>(p) ? launch<T, kLanes<T>>(p, device, stream) : launch<T, 1>(p, device, stream);
  });
}
