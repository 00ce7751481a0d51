// Batch normalisation of active pixels on CUDA, with the sum and the activation that follow it: forward and backward
// one launch each, which goes over the list twice.
#include "cuda/masked/activation_grad.cuh"
#include "cuda/masked/batch_norm_sums.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_batch_norm2d";
constexpr const char* kGradOp = "sparse_batch_norm2d_backward";

__device__ __forceinline__ float parameter(const void* data, DType dtype, int64_t c, float otherwise) {
  if (!data) return otherwise;
  if (dtype == DType::kF16) return to_float(static_cast<const __half*>(data)[c]);
  if (dtype == DType::kBF16) return to_float(static_cast<const __nv_bfloat16*>(data)[c]);
  return static_cast<const float*>(data)[c];
}

// Activations that are worth kernels of their own: the others are chosen at run time, in every element.
enum class Kind { kNone, kRelu, kSilu, kOther };
template <Kind kKind>
__device__ __forceinline__ Activation chosen(Activation activation) {
  return kKind == Kind::kNone ? Activation::kNone : kKind == Kind::kRelu ? Activation::kRelu : activation;
}
// Of 16-bit numbers a division may be two roundings off.
template <class T>
__device__ __forceinline__ float sigmoid(float z) {
  const float all = 1.f + __expf(-z);
  return sizeof(T) == 2 ? __fdividef(1.f, all) : 1.f / all;
}

// Waits for what the other CTAs found; each clears its share of the fringe meanwhile, once.
template <class T, class Params>
__device__ __forceinline__ void between_passes(const Params& p, const NormPlan& plan, const FringePlan& fringe,
                                               int column) {
  grid_barrier(plan, [&] {
    if (column == static_cast<int>(blockIdx.y))
      clear_fringe<T>(p, fringe, (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x,
                      int64_t{gridDim.x} * gridDim.y * blockDim.x);
  });
  grid_dependency_release();
}

// mean = sum of n m / n, variance = sum of (s + n m^2) / n - mean^2, over threads and parts of n pixels with mean m and
// sum of squared distances s. In double: what cancels there has been rounded to 24 bits. A thread sums about its own
// first pixel, so that the spread of the numbers bounds what cancels in float32.
template <class T, int kN, Kind kKind>
__global__ void __launch_bounds__(kNormThreads, 1)
    norm_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ BatchNormParams p,
                const __grid_constant__ NormPlan plan, const __grid_constant__ FringePlan fringe, float* workspace) {
  extern __shared__ __align__(16) char smem[];
  using Memory = NormMemory<T, kN, 1>;  // the table: mean, scale, shift
  constexpr int kBatch = Memory::kBatch;
  grid_dependency_wait();
  const NormThread thread(plan);
  const NormPart part(as_conv, plan, thread, kBatch);
  const bool added = p.residual.data != nullptr, used = static_cast<int>(blockIdx.x) < part.parts;
  const Memory shared(smem, plan, added);
  const int channels = plan.channels(kN), C = static_cast<int>(p.x.size[1]);
  for (int column = blockIdx.y; column < plan.columns; column += gridDim.y) {
    const int first = column * channels, own = static_cast<int>(threadIdx.x), channel = first + thread.word * kN;
    const bool taken = channel < C;
    const auto copy = [&](int slot, int step, int pixel) {
      copy_word(&shared.word(slot, step, 0), word_at<T, kN>(p.x, plan, pixel, channel));
    };
    const auto copy_residual = [&](int slot, int step, int pixel) {
      copy_word(&shared.third(slot, step), word_at<T, kN>(p.residual, plan, pixel, channel));
    };
    float about[kN] = {}, sum[kN] = {}, square[kN] = {};
    int pixels = 0;
    pass<false, kBatch>(
        as_conv, plan, thread, part, shared, taken, [](bool) { return false; }, copy, copy_residual,
        [&](const NormBatch& batch, const int (&at)[kBatch]) {
          Word<T, kN> x[kBatch];
          shared.load(batch.slot, 0, x);
#pragma unroll
          for (int step = 0; step < kBatch; ++step) {
            if (at[step] < 0) continue;
            if (!pixels)
#pragma unroll
              for (int e = 0; e < kN; ++e) about[e] = to_float(x[step].channel[e]);
            ++pixels;
#pragma unroll
            for (int e = 0; e < kN; ++e) {
              const float apart = to_float(x[step].channel[e]) - about[e];
              sum[e] += apart;
              square[e] += apart * apart;
            }
          }
        });
    int warp_sum = pixels;  // of the first word, which is of channels
    for (int apart = 32 / thread.pixels; apart < 32; apart *= 2)
      warp_sum += __shfl_xor_sync(0xffffffffu, warp_sum, apart);
    if (thread.lane == 0) shared.warp_pixels[thread.warp] = static_cast<float>(warp_sum);
    double sums[2];
    const double n = pixels;
    add_threads<kN>(
        thread, channels, shared.sums,
        [&](int e, int k) {
          const double offset = about[e], apart = sum[e];
          return k == 0 ? n * offset + apart : square[e] + (2 * apart + n * offset) * offset;
        },
        sums);
    const Found found = Found::of<2>(plan, workspace, column, channels);
    if (used && own < channels) {
      double all = 0;
      for (int warp = 0; warp < thread.warps; ++warp) all += shared.warp_pixels[warp];
      const double mean = sums[0] / fmax(all, 1.), spread = sums[1] - sums[0] * mean;
      float* const to = found.numbers + int64_t{blockIdx.x} * 2 * channels;
      to[own] = static_cast<float>(mean);
      to[channels + own] = static_cast<float>(spread > 0 || spread != spread ? spread : 0);
      if (own == 0) found.pixels[blockIdx.x] = static_cast<float>(all);
    }
    between_passes<T>(p, plan, fringe, column);
    double all[3];
    add_parts<3>(
        thread, channels, used ? part.parts : 0, shared.sums,
        [&](int of, int c, double (&to)[3]) {
          const double pixels = found.pixels[of], mean = found.numbers[int64_t{of} * 2 * channels + c];
          to[0] += pixels;
          to[1] += pixels * mean;
          to[2] += found.numbers[(int64_t{of} * 2 + 1) * channels + c] + pixels * mean * mean;
        },
        all);
    if (const int64_t c = first + own; own < channels && c < C && used) {
      const double some = all[0] > 1 ? all[0] : 1, whole = all[1] / some, spread = all[2] / some - whole * whole;
      const float mean = static_cast<float>(whole), variance = spread > 0 || spread != spread ? spread : 0;
      if (blockIdx.x == 0) {
        p.statistics[c] = mean, p.statistics[C + c] = variance;
        if (c == 0) p.statistics[2 * C] = static_cast<float>(all[0]);
        if (p.follow.running_mean) follow(p.follow, c, mean, variance, static_cast<float>(all[0]));
      }
      shared.number(0, own) = mean;
      shared.number(1, own) = parameter(p.weight, p.param_dtype, c, 1.f) / sqrtf(variance + p.eps);
      shared.number(2, own) = parameter(p.bias, p.param_dtype, c, 0.f);
    }
    __syncthreads();
    float mean[kN], scale[kN], shift[kN];
    shared.read(0, thread, mean), shared.read(1, thread, scale), shared.read(2, thread, shift);
    pass<true, kBatch>(
        as_conv, plan, thread, part, shared, taken, [&](bool) { return added; }, copy, copy_residual,
        [&](const NormBatch& batch, const int (&at)[kBatch]) {
          Word<T, kN> x[kBatch];
          shared.load(batch.slot, 0, x);
#pragma unroll
          for (int step = 0; step < kBatch; ++step) {
            if (at[step] < 0) continue;
            Word<T, kN> residual = {};
            if (added) residual = shared.third(batch.third, step);
#pragma unroll
            for (int e = 0; e < kN; ++e) {
              const float z =
                  (to_float(x[step].channel[e]) - mean[e]) * scale[e] + shift[e] + to_float(residual.channel[e]);
              x[step].channel[e] =
                  from_float<T>(kKind == Kind::kSilu ? z * sigmoid<T>(z)
                                                     : activate(chosen<kKind>(p.activation), p.activation_param, z));
            }
            *word_at<T, kN>(p.y, plan, at[step], channel) = x[step];
          }
        });
    cp_async_wait<0>();
    __syncthreads();  // before sums and table of another column
  }
}

// ---- backward

// Of channels: dy through the activation, by what it gave, or by what it was of, (x - mean) scale + shift.
template <class T, Kind kKind>
__device__ __forceinline__ float through(const BatchNormGradParams& p, float grad, float given, float x, float mean,
                                         float scale, float shift) {
  if (kKind == Kind::kNone) return grad;
  if (kKind == Kind::kSilu) {
    const float z = (x - mean) * scale + shift, s = sigmoid<T>(z);
    return grad * (s * (1.f + z * (1.f - s)));
  }
  return gradient(chosen<kKind>(p.activation), p.activation_param, grad,
                  p.given.data ? given : (x - mean) * scale + shift);
}

// Sums of g and of g (x - mean), then dx = g a + (x - mean) b + c.
template <class T, int kN, Kind kKind>
__global__ void __launch_bounds__(kNormThreads, 1)
    norm_grad_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ BatchNormGradParams p,
                     const __grid_constant__ NormPlan plan, const __grid_constant__ FringePlan fringe,
                     float* workspace) {
  extern __shared__ __align__(16) char smem[];
  using Memory = NormMemory<T, kN, 2>;  // the table: mean, scale (which is a), shift, b, c
  constexpr int kBatch = Memory::kBatch;
  grid_dependency_wait();
  const NormThread thread(plan);
  const NormPart part(as_conv, plan, thread, kBatch);
  const bool given = p.given.data != nullptr, used = static_cast<int>(blockIdx.x) < part.parts;
  const Memory shared(smem, plan, given);
  const int channels = plan.channels(kN), C = static_cast<int>(p.x.size[1]);
  for (int column = blockIdx.y; column < plan.columns; column += gridDim.y) {
    const int first = column * channels, own = static_cast<int>(threadIdx.x), channel = first + thread.word * kN;
    const bool taken = channel < C;
    float deviation = 1.f;  // of the channel that the thread tabulates, one over it
    if (const int64_t c = first + own; own < channels && c < C) {
      deviation = 1.f / sqrtf(p.statistics[C + c] + p.eps);
      shared.number(0, own) = p.statistics[c];
      shared.number(1, own) = parameter(p.weight, p.param_dtype, c, 1.f) * deviation;
      shared.number(2, own) = parameter(p.bias, p.param_dtype, c, 0.f);
    }
    __syncthreads();
    const auto copy = [&](int slot, int step, int pixel) {
      copy_word(&shared.word(slot, step, 0), word_at<T, kN>(p.grad, plan, pixel, channel));
      copy_word(&shared.word(slot, step, 1), word_at<T, kN>(p.x, plan, pixel, channel));
    };
    const auto copy_given = [&](int slot, int step, int pixel) {
      copy_word(&shared.third(slot, step), word_at<T, kN>(p.given, plan, pixel, channel));
    };
    float mean[kN], scale[kN], shift[kN], of_grad[kN] = {}, of_both[kN] = {};
    shared.read(0, thread, mean), shared.read(1, thread, scale), shared.read(2, thread, shift);
    // The ring keeps g, which ReLU's gradient is without rounding: the second pass needs no more of it.
    constexpr bool kKept = kKind == Kind::kRelu;
    pass<false, kBatch>(
        as_conv, plan, thread, part, shared, taken, [&](bool) { return given; }, copy, copy_given,
        [&](const NormBatch& batch, const int (&at)[kBatch]) {
          Word<T, kN> grad[kBatch], x[kBatch];
          shared.load(batch.slot, 0, grad), shared.load(batch.slot, 1, x);
#pragma unroll
          for (int step = 0; step < kBatch; ++step) {
            if (at[step] < 0) continue;
            Word<T, kN> z = {};
            if (given) z = shared.third(batch.third, step);
#pragma unroll
            for (int e = 0; e < kN; ++e) {
              const float v = to_float(x[step].channel[e]);
              const float g = through<T, kKind>(p, to_float(grad[step].channel[e]), to_float(z.channel[e]), v, mean[e],
                                                scale[e], shift[e]);
              of_grad[e] += g;
              of_both[e] += g * (v - mean[e]);
              if (kKept) grad[step].channel[e] = from_float<T>(g);
            }
            if (kKept && batch.held) shared.word(batch.slot, step, 0) = grad[step];
          }
        });
    double sums[2];
    add_threads<kN>(
        thread, channels, shared.sums, [&](int e, int k) { return double{k == 0 ? of_grad[e] : of_both[e]}; }, sums);
    const Found found = Found::of<2>(plan, workspace, column, channels);
    if (used && own < channels) {
      float* const to = found.numbers + int64_t{blockIdx.x} * 2 * channels;
      to[own] = static_cast<float>(sums[0]), to[channels + own] = static_cast<float>(sums[1]);
    }
    between_passes<T>(p, plan, fringe, column);
    add_parts<2>(
        thread, channels, used ? part.parts : 0, shared.sums,
        [&](int of, int c, double (&to)[2]) {
          to[0] += found.numbers[int64_t{of} * 2 * channels + c];
          to[1] += found.numbers[(int64_t{of} * 2 + 1) * channels + c];
        },
        sums);
    if (const int64_t c = first + own; own < channels && c < C && used) {
      const float pixels = fmaxf(p.statistics[2 * C], 1.f), a = shared.number(1, own);
      if (blockIdx.x == 0) {
        p.grad_params[c] = static_cast<float>(sums[1]) * deviation;
        p.grad_params[C + c] = static_cast<float>(sums[0]);
      }
      shared.number(3, own) = -a * deviation * deviation * static_cast<float>(sums[1] / pixels);
      shared.number(4, own) = -a * static_cast<float>(sums[0] / pixels);
    }
    __syncthreads();
    float b[kN], last[kN];
    shared.read(3, thread, b), shared.read(4, thread, last);
    pass<true, kBatch>(
        as_conv, plan, thread, part, shared, taken, [&](bool held) { return given && !(kKept && held); }, copy,
        copy_given,
        [&](const NormBatch& batch, const int (&at)[kBatch]) {
          Word<T, kN> grad[kBatch], x[kBatch];
          const bool kept = kKept && batch.held;
          shared.load(batch.slot, 0, grad), shared.load(batch.slot, 1, x);
#pragma unroll
          for (int step = 0; step < kBatch; ++step) {
            if (at[step] < 0) continue;
            Word<T, kN> z = {};
            if (given && !kept) z = shared.third(batch.third, step);
#pragma unroll
            for (int e = 0; e < kN; ++e) {
              const float v = to_float(x[step].channel[e]);
              float g = to_float(grad[step].channel[e]);
              if (!kept) g = through<T, kKind>(p, g, to_float(z.channel[e]), v, mean[e], scale[e], shift[e]);
              grad[step].channel[e] = from_float<T>(g);
              x[step].channel[e] = from_float<T>(g * scale[e] + ((v - mean[e]) * b[e] + last[e]));
            }
            *word_at<T, kN>(p.y, plan, at[step], channel) = x[step];
            if (p.grad_residual.data) *word_at<T, kN>(p.grad_residual, plan, at[step], channel) = grad[step];
          }
        });
    cp_async_wait<0>();
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kNormThreads) follow_kernel(const __grid_constant__ BatchNormFollowParams p) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t c = int64_t{blockIdx.x} * kNormThreads + threadIdx.x;
  if (c < p.channels) follow(p, c);
}

// ---- host

template <class T, int kN, Kind kKind>
Status launch(const BatchNormParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  NormLaunch launch;
  SBNET_TRY((plan_norm<T, kN, 1>(kOp, p.x, p.active, p.residual.data, device, &launch)));
  launch.plan.even = even(p.x) && even(p.y) && even(p.residual);
  return launch_norm<norm_kernel<T, kN, kKind>>(kOp, launch, p, static_cast<float*>(workspace), device, stream);
}

template <class T, int kN, Kind kKind>
Status launch(const BatchNormGradParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  NormLaunch launch;
  SBNET_TRY((plan_norm<T, kN, 2>(kGradOp, p.x, p.active, p.given.data, device, &launch)));
  launch.plan.even = even(p.x) && even(p.y) && even(p.grad) && even(p.given) && even(p.grad_residual);
  return launch_norm<norm_grad_kernel<T, kN, kKind>>(kGradOp, launch, p, static_cast<float*>(workspace), device,
                                                     stream);
}

// May a tensor, where there is one, be read and written in words?
bool words(const TensorView& t) { return !t.data || (channels_vectorize(t) && even(t)); }

Status zero(const char* op, float* to, int64_t count, cudaStream_t stream) {
  SBNET_CUDA_TRY(op, cudaMemsetAsync(to, 0, static_cast<size_t>(count) * sizeof(float), stream));
  return ok_status();
}

// run(T{}, the constant kN, the constant Kind) of what a call has.
template <class Params, class Run>
Status by_kind(const Params& p, bool in_words, const Run& run) {
  return by_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    const auto of = [&](auto kind) {
      return in_words && words_of_channels<T>(p) ? run(t, std::integral_constant<int, kLanes<T>>(), kind)
                                                 : run(t, std::integral_constant<int, 1>(), kind);
    };
    switch (p.activation) {
      case Activation::kNone:
        return of(std::integral_constant<Kind, Kind::kNone>());
      case Activation::kRelu:
        return of(std::integral_constant<Kind, Kind::kRelu>());
      case Activation::kSilu:
        return of(std::integral_constant<Kind, Kind::kSilu>());
      default:
        return of(std::integral_constant<Kind, Kind::kOther>());
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_batch_norm2d_cuda(const sbnet::BatchNormParams* params, void* workspace,
                                             void* stream_handle) {
  using namespace sbnet;
  const BatchNormParams& p = *params;
  SBNET_TRY(validate(p));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (!p.x.size[0]) return zero(kOp, p.statistics, 2 * p.x.size[1] + 1, stream);
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_kind(p, words(p.x) && words(p.y) && words(p.residual), [&](auto t, auto n, auto kind) {
    return launch<decltype(t), decltype(n)::value, decltype(kind)::value>(p, workspace, device, stream);
  });
}

sbnet::Status sbnet_sparse_batch_norm2d_backward_cuda(const sbnet::BatchNormGradParams* params, void* workspace,
                                                      void* stream_handle) {
  using namespace sbnet;
  const BatchNormGradParams& p = *params;
  SBNET_TRY(validate(p));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (!p.x.size[0]) return zero(kGradOp, p.grad_params, 2 * p.x.size[1], stream);
  DeviceInfo device;
  SBNET_TRY(current_device(kGradOp, &device));
  const bool in_words = words(p.grad) && words(p.x) && words(p.y) && words(p.given) && words(p.grad_residual);
  return by_kind(p, in_words, [&](auto t, auto n, auto kind) {
    return launch<decltype(t), decltype(n)::value, decltype(kind)::value>(p, workspace, device, stream);
  });
}

sbnet::Status sbnet_batch_norm_follow_cuda(const sbnet::BatchNormFollowParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kFollowOp = "batch_norm_follow_";
  if (!p->channels) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kFollowOp, &device));
  const unsigned ctas = static_cast<unsigned>((p->channels + kNormThreads - 1) / kNormThreads);
  SBNET_CUDA_TRY(kFollowOp, launch_dependent(device, follow_kernel, dim3(ctas), dim3(kNormThreads), 0,
                                             static_cast<cudaStream_t>(stream), *p));
  return ok_status();
}
