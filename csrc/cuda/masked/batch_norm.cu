// Batch normalisation of active pixels on CUDA. Forward: one launch goes over parts of the list, one merges what the
// parts found, one writes the plane. Backward: one launch sums over parts of the list, one adds them and makes each
// channel's three numbers, one writes the plane.
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

// ---- what all CTAs that merge have in common: kColumns channels, kLanes parts at a time

constexpr int kColumns = 8, kMergeLanes = 64;

// The sum over the lanes of each column, in order; of no use to lanes but the first.
__device__ __forceinline__ double sum_of_lanes(double own, double (*found)[kColumns]) {
  const int column = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  found[lane][column] = own;
  __syncthreads();
  for (int half = kMergeLanes / 2; half; half /= 2) {
    if (lane < half) found[lane][column] += found[lane + half][column];
    __syncthreads();
  }
  const double sum = found[0][column];
  __syncthreads();
  return sum;
}

// mean = sum of n m / n, square = sum of (s + n (m - mean)^2), over parts of n pixels with mean m and square s.
__global__ void __launch_bounds__(kColumns* kMergeLanes)
    merge_kernel(const __grid_constant__ BatchNormParams p, int parts, const float* values, const float* counts,
                 float* table) {
  __shared__ double found[kMergeLanes][kColumns];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], c = int64_t{blockIdx.x} * kColumns + threadIdx.x % kColumns;
  const int lane = threadIdx.x / kColumns;
  double pixels = 0, total = 0;
  for (int part = lane; part < parts; part += kMergeLanes) {
    const float count = counts[part];
    pixels += count;
    if (count > 0.f && c < C) total += static_cast<double>(count) * values[2 * int64_t{part} * C + c];
  }
  pixels = sum_of_lanes(pixels, found);
  const double some = pixels > 1 ? pixels : 1, mean = sum_of_lanes(total, found) / some;
  double square = 0;
  for (int part = lane; part < parts; part += kMergeLanes) {
    const float count = counts[part];
    if (!(count > 0.f) || c >= C) continue;
    const double apart = values[2 * int64_t{part} * C + c] - mean;
    square += values[(2 * int64_t{part} + 1) * C + c] + count * apart * apart;
  }
  const float variance = static_cast<float>(sum_of_lanes(square, found) / some);
  if (lane || c >= C) return;
  p.statistics[c] = static_cast<float>(mean), p.statistics[C + c] = variance;
  if (c == 0) p.statistics[2 * C] = static_cast<float>(pixels);
  table[c] = static_cast<float>(mean);
  table[C + c] = parameter(p.weight, p.param_dtype, c, 1.f) / sqrtf(variance + p.eps);
  table[2 * C + c] = parameter(p.bias, p.param_dtype, c, 0.f);
}

template <class T, int kN>
__global__ void __launch_bounds__(kPlaneThreads)
    norm_kernel(const __grid_constant__ BatchNormParams p, const __grid_constant__ PlaneMap map, const float* table) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1];
  float mean[kN], scale[kN], shift[kN];
  int64_t first = 0;
  for_plane<kN>(
      map,
      [&](int64_t channel) {
        first = channel;
#pragma unroll
        for (int e = 0; e < kN; ++e)
          mean[e] = table[channel + e], scale[e] = table[C + channel + e], shift[e] = table[2 * C + channel + e];
      },
      [&](const PlanePixel& at) { return OneWord<T, kN>{*word_at<T, kN>(p.x, at, first)}; },
      [&](const PlanePixel& at, const OneWord<T, kN>& x) {
        store_word<T, kN>(p.y, at, first,
                          [&](int e) { return (to_float(x.a.channel[e]) - mean[e]) * scale[e] + shift[e]; });
      });
}

// ---- backward

// A CTA takes a part of the list and some words of channels; its threads' sums are added in order.
template <class T, int kN>
__global__ void __launch_bounds__(kPlaneThreads)
    sum_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ BatchNormGradParams p,
               const __grid_constant__ SumPlan plan, float* sums) {
  extern __shared__ float found[];  // [kPlaneThreads][2 * kN]
  grid_dependency_wait();
  grid_dependency_release();
  uint32_t lane, word;
  plan.words.divmod(threadIdx.x, &lane, &word);
  const uint32_t words = plan.words.divisor, lanes = plan.words.quotient(kPlaneThreads);
  const int64_t C = p.x.size[1], channel = int64_t{blockIdx.y * words + word} * kN;
  const bool taken = lane < lanes && channel < C;
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int64_t entries = plan.list.tiles(count, 1), each = (entries + plan.parts - 1) / plan.parts;
  const int64_t begin = each * blockIdx.x, end = min(begin + each, entries);
  float of_grad[kN] = {}, of_both[kN] = {}, mean[kN] = {};
  if (taken)
#pragma unroll
    for (int e = 0; e < kN; ++e) mean[e] = p.statistics[channel + e];
  if (taken) {
    constexpr int kBatch = 4;
    for (int64_t first = begin + lane; first < end; first += kBatch * lanes) {
      TwoWords<T, kN> loaded[kBatch];
      bool in[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int64_t entry = first + k * lanes;
        const portable::Pixel pixel = portable::locate_pixel(as_conv, plan.list, entry < end ? entry : first, count);
        in[k] = entry < end && pixel.n >= 0;
        const PlanePixel at = {pixel.n, pixel.row, pixel.column, true};
        if (in[k]) loaded[k] = {*word_at<T, kN>(p.grad, at, channel), *word_at<T, kN>(p.x, at, channel)};
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!in[k]) continue;
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          const float g = to_float(loaded[k].a.channel[e]);
          of_grad[e] += g;
          of_both[e] += g * (to_float(loaded[k].b.channel[e]) - mean[e]);
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    found[(2 * e) * kPlaneThreads + threadIdx.x] = of_grad[e];
    found[(2 * e + 1) * kPlaneThreads + threadIdx.x] = of_both[e];
  }
  __syncthreads();
  // Each of words * kN * 2 numbers is added by one thread.
  for (uint32_t k = threadIdx.x; k < words * 2 * kN; k += kPlaneThreads) {
    const uint32_t of_word = k % words, number = k / words;
    const int64_t c = int64_t{blockIdx.y * words + of_word} * kN + number / 2;
    if (c >= C) continue;
    double sum = 0;
    for (uint32_t l = 0; l < lanes; ++l) sum += found[number * kPlaneThreads + l * words + of_word];
    sums[(2 * int64_t{blockIdx.x} + number % 2) * C + c] = static_cast<float>(sum);
  }
}

__global__ void __launch_bounds__(kColumns* kMergeLanes)
    add_kernel(const __grid_constant__ BatchNormGradParams p, int parts, const float* sums, float* table) {
  __shared__ double found[kMergeLanes][kColumns];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], c = int64_t{blockIdx.x} * kColumns + threadIdx.x % kColumns;
  const int lane = threadIdx.x / kColumns;
  double of_grad = 0, of_both = 0;
  if (c < C)
    for (int part = lane; part < parts; part += kMergeLanes) {
      of_grad += sums[2 * int64_t{part} * C + c];
      of_both += sums[(2 * int64_t{part} + 1) * C + c];
    }
  of_grad = sum_of_lanes(of_grad, found);
  of_both = sum_of_lanes(of_both, found);
  if (lane || c >= C) return;
  const float pixels = fmaxf(p.statistics[2 * C], 1.f), scale = 1.f / sqrtf(p.statistics[C + c] + p.eps);
  const float a = parameter(p.weight, p.param_dtype, c, 1.f) * scale;
  p.grad_params[c] = static_cast<float>(of_both) * scale;
  p.grad_params[C + c] = static_cast<float>(of_grad);
  table[c] = p.statistics[c];
  table[C + c] = a;
  table[2 * C + c] = -a * scale * scale * static_cast<float>(of_both / pixels);
  table[3 * C + c] = -a * static_cast<float>(of_grad / pixels);
}

template <class T, int kN>
__global__ void __launch_bounds__(kPlaneThreads)
    norm_grad_kernel(const __grid_constant__ BatchNormGradParams p, const __grid_constant__ PlaneMap map,
                     const float* table) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1];
  float mean[kN], a[kN], b[kN], shift[kN];
  int64_t first = 0;
  for_plane<kN>(
      map,
      [&](int64_t channel) {
        first = channel;
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          mean[e] = table[channel + e], a[e] = table[C + channel + e];
          b[e] = table[2 * C + channel + e], shift[e] = table[3 * C + channel + e];
        }
      },
      [&](const PlanePixel& at) {
        return TwoWords<T, kN>{*word_at<T, kN>(p.grad, at, first), *word_at<T, kN>(p.x, at, first)};
      },
      [&](const PlanePixel& at, const TwoWords<T, kN>& in) {
        store_word<T, kN>(p.y, at, first, [&](int e) {
          return to_float(in.a.channel[e]) * a[e] + ((to_float(in.b.channel[e]) - mean[e]) * b[e] + shift[e]);
        });
      });
}

__global__ void __launch_bounds__(kPlaneThreads) follow_kernel(const __grid_constant__ BatchNormFollowParams p) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t c = int64_t{blockIdx.x} * kPlaneThreads + threadIdx.x;
  if (c < p.channels) follow(p, c);
}

// ---- host

unsigned merge_ctas(int64_t C) { return static_cast<unsigned>((C + kColumns - 1) / kColumns); }

template <class T, int kN>
Status launch_norm(const BatchNormParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  Conv2dParams as_conv;
  SumPlan plan = {portable::PixelList(Conv2dParams{}), FastDiv(1), 1, 1};
  dim3 ctas;
  SBNET_TRY(plan_sums<kN>(kOp, p.x, p.active, device, &as_conv, &plan, &ctas));
  float* const values = static_cast<float*>(workspace);
  float* const counts = values + 2 * kMostNormParts * p.x.size[1];
  float* const table = counts + kMostNormParts;
  SBNET_CUDA_TRY(kOp,
                 launch_dependent(device, moments_kernel<T, kN>, ctas, dim3(kPlaneThreads),
                                  kPlaneThreads * (2 * kN + 1) * sizeof(float), stream, as_conv, plan, values, counts));
  const float *found = values, *pixels = counts, *read = table;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, merge_kernel, dim3(merge_ctas(p.x.size[1])),
                                       dim3(kColumns * kMergeLanes), 0, stream, p, plan.parts, found, pixels, table));
  return launch_plane<kN>(kOp, norm_kernel<T, kN>, p, device, stream, read);
}

template <class T, int kN>
Status launch_grad(const BatchNormGradParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  float* const sums = static_cast<float*>(workspace);
  float* const table = sums + 2 * kMostNormParts * p.x.size[1];
  Conv2dParams as_conv;
  SumPlan plan = {portable::PixelList(Conv2dParams{}), FastDiv(1), 1, 1};
  dim3 ctas;
  SBNET_TRY(plan_sums<kN>(kGradOp, p.x, p.active, device, &as_conv, &plan, &ctas));
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device, sum_kernel<T, kN>, ctas, dim3(kPlaneThreads),
                                           kPlaneThreads * 2 * kN * sizeof(float), stream, as_conv, p, plan, sums));
  const float *found = sums, *read = table;
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device, add_kernel, dim3(merge_ctas(p.x.size[1])),
                                           dim3(kColumns * kMergeLanes), 0, stream, p, plan.parts, found, table));
  return launch_plane<kN>(kGradOp, norm_grad_kernel<T, kN>, p, device, stream, read);
}

Status zero(const char* op, float* to, int64_t count, cudaStream_t stream) {
  SBNET_CUDA_TRY(op, cudaMemsetAsync(to, 0, static_cast<size_t>(count) * sizeof(float), stream));
  return ok_status();
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
  return by_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    return words_of_channels<T>(p) ? launch_norm<T, kLanes<T>>(p, workspace, device, stream)
                                   : launch_norm<T, 1>(p, workspace, device, stream);
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
  return by_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    return words_of_channels<T>(p) && channels_vectorize(p.grad)
               ? launch_grad<T, kLanes<T>>(p, workspace, device, stream)
               : launch_grad<T, 1>(p, workspace, device, stream);
  });
}

sbnet::Status sbnet_batch_norm_follow_cuda(const sbnet::BatchNormFollowParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kFollowOp = "batch_norm_follow_";
  if (!p->channels) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kFollowOp, &device));
  const unsigned ctas = static_cast<unsigned>((p->channels + kPlaneThreads - 1) / kPlaneThreads);
  SBNET_CUDA_TRY(kFollowOp, launch_dependent(device, follow_kernel, dim3(ctas), dim3(kPlaneThreads), 0,
                                             static_cast<cudaStream_t>(stream), *p));
  return ok_status();
}
