// Batch normalisation of active pixels on CUDA, with the sum and the activation that follow it. Forward and backward:
// one launch goes over parts of the list, one merges what they found and goes over the list once more.
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
enum class Kind { kNone, kRelu, kOther };
template <Kind kKind>
__device__ __forceinline__ Activation chosen(Activation activation) {
  return kKind == Kind::kNone ? Activation::kNone : kKind == Kind::kRelu ? Activation::kRelu : activation;
}

constexpr int kPixels = 2;  // whose loads a thread has under way together: of two tensors or three

template <class T, int kN>
struct Two {
  Word<T, kN> a, b;
};
template <class T, int kN>
__device__ __forceinline__ Word<T, kN> zeros() {
  Word<T, kN> word;
#pragma unroll
  for (int e = 0; e < kN; ++e) word.channel[e] = from_float<T>(0.f);
  return word;
}
template <class T, int kN>
struct Three {
  Word<T, kN> a, b, c;
};

// mean = sum of n m / n, variance = sum of (s + n m^2) / n - mean^2, over parts of n pixels with mean m and sum of
// squared distances s. In double: what cancels there has been rounded to 24 bits.
template <class T, int kN, Kind kKind>
__global__ void __launch_bounds__(kSumThreads, kSumCtas)
    norm_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ BatchNormParams p,
                const __grid_constant__ SumPlan plan, const __grid_constant__ FringePlan fringe, const float* values,
                const float* counts) {
  __shared__ __align__(16) float numbers[3 * kSumChannels];  // mean, scale, shift
  const int64_t C = p.x.size[1];
  const SumThread thread = SumThread::of<kN>(plan, C);
  const int channels = static_cast<int>(thread.words) * kN;
  const int64_t first = int64_t{blockIdx.y} * channels;
  const Table<kN> table = {numbers, channels};
  double sums[3];
  const SumList list(as_conv, plan);
  // Before the wait: the launch ahead sums what earlier ones wrote, for which it has waited itself before it let this
  // one start. It reads nothing that is cleared here.
  clear_fringe<T>(p, fringe, (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kSumThreads + threadIdx.x,
                  int64_t{gridDim.x} * gridDim.y * kSumThreads);
  const bool used = static_cast<int>(blockIdx.x) < list.parts;
  if (used) find_pixels(as_conv, plan, list, list.begin, 0);
  grid_dependency_wait();
  grid_dependency_release();
  if (!used) return;
  merge_parts(channels, list.parts, sums, [&](int part, int channel, double (&to)[3]) {
    const float n = counts[part];
    if (!(n > 0.f) || first + channel >= C) return;
    const double mean = values[2 * int64_t{part} * C + first + channel];
    to[0] += n;
    to[1] += n * mean;
    to[2] += values[(2 * int64_t{part} + 1) * C + first + channel] + n * mean * mean;
  });
  if (const int64_t c = first + threadIdx.x; static_cast<int>(threadIdx.x) < channels && c < C) {
    const double some = sums[0] > 1 ? sums[0] : 1, whole = sums[1] / some;
    const double spread = sums[2] / some - whole * whole;
    const float mean = static_cast<float>(whole), variance = spread > 0 || spread != spread ? spread : 0;
    if (blockIdx.x == 0) {
      p.statistics[c] = mean, p.statistics[C + c] = variance;
      if (c == 0) p.statistics[2 * C] = static_cast<float>(sums[0]);
      if (p.follow.running_mean) follow(p.follow, c, mean, variance, static_cast<float>(sums[0]));
    }
    const int own = static_cast<int>(threadIdx.x);
    table.at(0, own) = mean;
    table.at(1, own) = parameter(p.weight, p.param_dtype, c, 1.f) / sqrtf(variance + p.eps);
    table.at(2, own) = parameter(p.bias, p.param_dtype, c, 0.f);
  }
  __syncthreads();
  const bool added = p.residual.data != nullptr;
  for_part<kPixels>(
      as_conv, plan, thread, list,
      [&](const Place& place) {
        Two<T, kN> in = {*word_at<T, kN>(p.x, plan, place, thread.channel), zeros<T, kN>()};
        if (added) in.b = *word_at<T, kN>(p.residual, plan, place, thread.channel);
        return in;
      },
      [&](const Place(&places)[kPixels], const Two<T, kN>(&in)[kPixels]) {
        Word<T, kN> out[kPixels];
        constexpr int kTogether = Table<kN>::kTogether;
#pragma unroll
        for (int read = 0; read < Table<kN>::kReads; ++read) {
          float mean[kTogether], scale[kTogether], shift[kTogether];
          table.read(0, read, thread, mean), table.read(1, read, thread, scale), table.read(2, read, thread, shift);
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
#pragma unroll
            for (int k = 0; k < kPixels; ++k) {
              const int e = read * kTogether + i;
              const float z =
                  (to_float(in[k].a.channel[e]) - mean[i]) * scale[i] + shift[i] + to_float(in[k].b.channel[e]);
              out[k].channel[e] = from_float<T>(activate(chosen<kKind>(p.activation), p.activation_param, z));
            }
        }
#pragma unroll
        for (int k = 0; k < kPixels; ++k)
          if (places[k].in()) *word_at<T, kN>(p.y, plan, places[k], thread.channel) = out[k];
      });
}

// ---- backward

// g of a channel: dy through the activation, by what it gave, or by what it was of, (x - mean) scale + shift.
template <Kind kKind, class T, int kN>
__device__ __forceinline__ float through(const BatchNormGradParams& p, const Three<T, kN>& in, int e, float mean,
                                         float scale, float shift) {
  const float grad = to_float(in.a.channel[e]);
  if (kKind == Kind::kNone) return grad;
  const float z = p.given.data ? to_float(in.c.channel[e]) : (to_float(in.b.channel[e]) - mean) * scale + shift;
  return gradient(chosen<kKind>(p.activation), p.activation_param, grad, z);
}
// Mean, scale and shift of a channel that a thread of the CTA has.
template <int kN>
__device__ __forceinline__ void tabulate(const BatchNormGradParams& p, int64_t c, const Table<kN>& table, int own) {
  const int64_t C = p.x.size[1];
  table.at(0, own) = p.statistics[c];
  table.at(1, own) = parameter(p.weight, p.param_dtype, c, 1.f) * (1.f / sqrtf(p.statistics[C + c] + p.eps));
  table.at(2, own) = parameter(p.bias, p.param_dtype, c, 0.f);
}
template <class T, int kN>
__device__ __forceinline__ Three<T, kN> load_three(const BatchNormGradParams& p, const SumPlan& plan,
                                                   const Place& place, int64_t channel) {
  Three<T, kN> in = {*word_at<T, kN>(p.grad, plan, place, channel), *word_at<T, kN>(p.x, plan, place, channel),
                     zeros<T, kN>()};
  if (p.given.data) in.c = *word_at<T, kN>(p.given, plan, place, channel);
  return in;
}

// Sums of g and of g (x - mean). A CTA takes a part of the list and some words of channels.
template <class T, int kN, Kind kKind>
__global__ void __launch_bounds__(kSumThreads, kSumCtas)
    sum_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ BatchNormGradParams p,
               const __grid_constant__ SumPlan plan, float* sums) {
  __shared__ float found[kN < 4 ? 2 * kN : 8][kSumThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1];
  const SumThread thread = SumThread::of<kN>(plan, C);
  const SumList list(as_conv, plan);
  if (static_cast<int>(blockIdx.x) >= list.parts) return;
  find_pixels(as_conv, plan, list, list.begin, 0);
  float of_grad[kN] = {}, of_both[kN] = {};
  __shared__ __align__(16) float numbers[3 * kSumChannels];
  const int channels = static_cast<int>(thread.words) * kN;
  const Table<kN> table = {numbers, channels};
  if (const int64_t c = int64_t{blockIdx.y} * channels + threadIdx.x; static_cast<int>(threadIdx.x) < channels && c < C)
    tabulate(p, c, table, static_cast<int>(threadIdx.x));
  __syncthreads();
  for_part<kPixels>(
      as_conv, plan, thread, list,
      [&](const Place& place) { return load_three<T, kN>(p, plan, place, thread.channel); },
      [&](const Place(&)[kPixels], const Three<T, kN>(&in)[kPixels]) {  // of no pixel g is 0
        constexpr int kTogether = Table<kN>::kTogether;
#pragma unroll
        for (int read = 0; read < Table<kN>::kReads; ++read) {
          float mean[kTogether], scale[kTogether], shift[kTogether];
          table.read(0, read, thread, mean), table.read(1, read, thread, scale), table.read(2, read, thread, shift);
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
#pragma unroll
            for (int k = 0; k < kPixels; ++k) {
              const int e = read * kTogether + i;
              const float g = through<kKind>(p, in[k], e, mean[i], scale[i], shift[i]);
              of_grad[e] += g;
              of_both[e] += g * (to_float(in[k].b.channel[e]) - mean[i]);
            }
        }
      });
  merge_threads<kN, 2>(
      plan, thread, C,
      [&](int i, int e) {
        found[2 * i][threadIdx.x] = of_grad[e];
        found[2 * i + 1][threadIdx.x] = of_both[e];
      },
      [&](int i, int at, double (&to)[2]) {
        to[0] += found[2 * i][at];
        to[1] += found[2 * i + 1][at];
      },
      [&](int64_t c, const double (&all)[2]) {
        sums[2 * int64_t{blockIdx.x} * C + c] = static_cast<float>(all[0]);
        sums[(2 * int64_t{blockIdx.x} + 1) * C + c] = static_cast<float>(all[1]);
      });
}

template <class T, int kN, Kind kKind>
__global__ void __launch_bounds__(kSumThreads, kSumCtas)
    norm_grad_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ BatchNormGradParams p,
                     const __grid_constant__ SumPlan plan, const __grid_constant__ FringePlan fringe,
                     const float* found) {
  __shared__ __align__(16) float numbers[5 * kSumChannels];  // mean, scale, shift; dx = g a + (x - mean) b + c
  const int64_t C = p.x.size[1];
  const SumThread thread = SumThread::of<kN>(plan, C);
  const int channels = static_cast<int>(thread.words) * kN;
  const int64_t first = int64_t{blockIdx.y} * channels;
  const Table<kN> table = {numbers, channels};
  double sums[2];
  const SumList list(as_conv, plan);
  clear_fringe<T>(p, fringe, (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kSumThreads + threadIdx.x,
                  int64_t{gridDim.x} * gridDim.y * kSumThreads);
  const bool used = static_cast<int>(blockIdx.x) < list.parts;
  if (used) find_pixels(as_conv, plan, list, list.begin, 0);
  grid_dependency_wait();
  grid_dependency_release();
  if (!used) return;
  merge_parts(channels, list.parts, sums, [&](int part, int channel, double (&to)[2]) {
    if (first + channel >= C) return;
    to[0] += found[2 * int64_t{part} * C + first + channel];
    to[1] += found[(2 * int64_t{part} + 1) * C + first + channel];
  });
  if (const int64_t c = first + threadIdx.x; static_cast<int>(threadIdx.x) < channels && c < C) {
    const float pixels = fmaxf(p.statistics[2 * C], 1.f), scale = 1.f / sqrtf(p.statistics[C + c] + p.eps);
    const float a = parameter(p.weight, p.param_dtype, c, 1.f) * scale;
    if (blockIdx.x == 0) {
      p.grad_params[c] = static_cast<float>(sums[1]) * scale;
      p.grad_params[C + c] = static_cast<float>(sums[0]);
    }
    const int own = static_cast<int>(threadIdx.x);
    tabulate(p, c, table, own);
    table.at(3, own) = -a * scale * scale * static_cast<float>(sums[1] / pixels);
    table.at(4, own) = -a * static_cast<float>(sums[0] / pixels);
  }
  __syncthreads();
  for_part<kPixels>(
      as_conv, plan, thread, list,
      [&](const Place& place) { return load_three<T, kN>(p, plan, place, thread.channel); },
      [&](const Place(&places)[kPixels], const Three<T, kN>(&in)[kPixels]) {
        Word<T, kN> out[kPixels], g[kPixels];
        constexpr int kTogether = Table<kN>::kTogether;
#pragma unroll
        for (int read = 0; read < Table<kN>::kReads; ++read) {
          float mean[kTogether], scale[kTogether], shift[kTogether], b[kTogether], last[kTogether];
          table.read(0, read, thread, mean), table.read(1, read, thread, scale), table.read(2, read, thread, shift);
          table.read(3, read, thread, b), table.read(4, read, thread, last);
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
#pragma unroll
            for (int k = 0; k < kPixels; ++k) {
              const int e = read * kTogether + i;
              const float own = through<kKind>(p, in[k], e, mean[i], scale[i], shift[i]);
              g[k].channel[e] = from_float<T>(own);
              out[k].channel[e] =
                  from_float<T>(own * scale[i] + ((to_float(in[k].b.channel[e]) - mean[i]) * b[i] + last[i]));
            }
        }
#pragma unroll
        for (int k = 0; k < kPixels; ++k) {
          if (!places[k].in()) continue;
          *word_at<T, kN>(p.y, plan, places[k], thread.channel) = out[k];
          if (p.grad_residual.data) *word_at<T, kN>(p.grad_residual, plan, places[k], thread.channel) = g[k];
        }
      });
}

__global__ void __launch_bounds__(kSumThreads) follow_kernel(const __grid_constant__ BatchNormFollowParams p) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t c = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  if (c < p.channels) follow(p, c);
}

// ---- host

template <class T, int kN, Kind kKind>
Status launch_norm(const BatchNormParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  Conv2dParams as_conv;
  SumPlan plan = {portable::PixelList(Conv2dParams{}), FastDiv(1), 1, 1, false};
  dim3 ctas;
  SBNET_TRY(plan_sums<kN>(kOp, p.x, p.active, device, &as_conv, &plan, &ctas));
  plan.alike = alike(p.x, p.y) && alike(p.x, p.residual);
  float* const values = static_cast<float*>(workspace);
  float* const counts = values + 2 * kMostNormParts * p.x.size[1];
  SBNET_CUDA_TRY(kOp, launch_dependent(device, moments_kernel<T, kN>, ctas, dim3(kSumThreads), 0, stream, as_conv, plan,
                                       values, counts));
  const float *found = values, *pixels = counts;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, norm_kernel<T, kN, kKind>, ctas, dim3(kSumThreads), 0, stream, as_conv,
                                       p, plan, FringePlan(p), found, pixels));
  return ok_status();
}

template <class T, int kN, Kind kKind>
Status launch_grad(const BatchNormGradParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  float* const sums = static_cast<float*>(workspace);
  Conv2dParams as_conv;
  SumPlan plan = {portable::PixelList(Conv2dParams{}), FastDiv(1), 1, 1, false};
  dim3 ctas;
  SBNET_TRY(plan_sums<kN>(kGradOp, p.x, p.active, device, &as_conv, &plan, &ctas));
  plan.alike = alike(p.x, p.y) && alike(p.x, p.grad) && alike(p.x, p.given) && alike(p.x, p.grad_residual);
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device, sum_kernel<T, kN, kKind>, ctas, dim3(kSumThreads), 0, stream,
                                           as_conv, p, plan, sums));
  const float* found = sums;
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device, norm_grad_kernel<T, kN, kKind>, ctas, dim3(kSumThreads), 0, stream,
                                           as_conv, p, plan, FringePlan(p), found));
  return ok_status();
}

// May a tensor, where there is one, be read and written in words?
bool words(const TensorView& t) { return !t.data || channels_vectorize(t); }

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
  return by_kind(p, words(p.residual), [&](auto t, auto n, auto kind) {
    return launch_norm<decltype(t), decltype(n)::value, decltype(kind)::value>(p, workspace, device, stream);
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
  const bool in_words = channels_vectorize(p.grad) && words(p.given) && words(p.grad_residual);
  return by_kind(p, in_words, [&](auto t, auto n, auto kind) {
    return launch_grad<decltype(t), decltype(n)::value, decltype(kind)::value>(p, workspace, device, stream);
  });
}

sbnet::Status sbnet_batch_norm_follow_cuda(const sbnet::BatchNormFollowParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kFollowOp = "batch_norm_follow_";
  if (!p->channels) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kFollowOp, &device));
  const unsigned ctas = static_cast<unsigned>((p->channels + kSumThreads - 1) / kSumThreads);
  SBNET_CUDA_TRY(kFollowOp, launch_dependent(device, follow_kernel, dim3(ctas), dim3(kSumThreads), 0,
                                             static_cast<cudaStream_t>(stream), *p));
  return ok_status();
}
