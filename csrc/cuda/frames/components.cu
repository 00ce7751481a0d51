// connected_components on CUDA, six launches. A warp takes 32 pixels of a row, and what a run of them does, its first
// lane does:
//   label_kernel    a run's pixels name its first one
//   join_kernel     runs that touch are joined in a forest whose roots are the components' first pixels (Playne and
//                   Hawick 2018): roots are lowered by atomicMin, so no order of the threads shows
//   count_kernel    runs name their roots, which count pixels
//   tally_kernel    how many components of a chunk of pixels count
//   rank_kernel     their rows, in the order of their first pixels
//   measure_kernel  boxes, and sums as whole numbers
// Nothing is read on the host.
#include "core/frames/components.h"
#include "cuda/by_dtype.cuh"
#include "cuda/scan.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = kComponentsChunk / kThreads;

struct ComponentsArgs {
  ComponentsParams p;
  int32_t* label;  // [N,H,W]: of a pixel above the threshold one of its component, not after it; of others -1
  int32_t* rank;   // [N,H,W], of roots: pixels, then the row
  int32_t* tally;  // [N,chunks]
  int height, width, area, chunks;
  FastDiv words_of_row;  // words: 32 pixels of a row
  int words, parts;      // of an image; parts: CTAs
};

// The pixel of a lane, and the run that it is in.
struct Place {
  int64_t n;
  int x, y, at;  // at: in the image
  bool inside;
};
__device__ __forceinline__ Place place_of(const ComponentsArgs& a) {
  const int n = blockIdx.x / a.parts;
  const int word = (static_cast<int>(blockIdx.x) - n * a.parts) * kWarps + threadIdx.x / 32;
  uint32_t y, first;
  a.words_of_row.divmod(static_cast<uint32_t>(word), &y, &first);
  const int x = static_cast<int>(first) * 32 + threadIdx.x % 32;
  return {n, x, static_cast<int>(y), static_cast<int>(y) * a.width + x, word < a.words && x < a.width};
}

struct Run {
  uint32_t bits;   // the warp's pixels above the threshold
  int first, end;  // lanes
};
__device__ __forceinline__ Run run_of(bool set) {
  const int lane = threadIdx.x % 32;
  const uint32_t bits = __ballot_sync(~0u, set), below = ~bits & ((1u << lane) - 1), above = ~bits >> lane;
  return {bits, below ? 32 - __clz(static_cast<int>(below)) : 0,
          above ? lane + __ffs(static_cast<int>(above)) - 1 : 32};
}

template <class T>
__device__ __forceinline__ float score_at(const ComponentsArgs& a, const Place& at) {
  const TensorView& s = a.p.scores;
  return to_float(static_cast<const T*>(s.data)[at.n * s.stride[0] + at.y * s.stride[2] + at.x * s.stride[3]]);
}

// Others may lower labels meanwhile: an old one still names a pixel of the component.
__device__ __forceinline__ int root_of(const volatile int32_t* label, int at) {
  for (int next = label[at]; next != at; next = label[at]) at = next;
  return at;
}

__device__ __forceinline__ void join(int32_t* label, int a, int b) {
  while (true) {
    a = root_of(label, a), b = root_of(label, b);
    if (a == b) return;
    const int high = max(a, b), low = min(a, b);
    const int before = atomicMin(label + high, low);
    if (before == high) return;  // it was a root, and hangs on `low` now
    a = before, b = low;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) label_kernel(const __grid_constant__ ComponentsArgs a) {
  grid_dependency_release();
  const Place at = place_of(a);
  grid_dependency_wait();
  const Run run = run_of(at.inside && score_at<T>(a, at) > a.p.least);
  if (!at.inside) return;
  const int lane = threadIdx.x % 32;
  const bool set = run.bits >> lane & 1;
  a.label[at.n * a.area + at.at] = set ? at.at - lane + run.first : -1;
  if (set) a.rank[at.n * a.area + at.at] = 0;
}

__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ ComponentsArgs a) {
  grid_dependency_release();
  const Place at = place_of(a);
  grid_dependency_wait();
  int32_t* const label = a.label + at.n * a.area;
  if (!at.inside || label[at.at] < 0) return;
  const auto set = [&](int down, int right) {
    const int y = at.y + down, x = at.x + right;
    return y >= 0 && x >= 0 && x < a.width && label[at.at + down * a.width + right] >= 0;
  };
  const bool before = set(0, -1);
  if (before && threadIdx.x % 32 == 0) join(label, at.at, at.at - 1);
  // Where the neighbour in the row touches the same run above, that one joins them.
  if (set(-1, 0)) {
    if (!(before && set(-1, -1))) join(label, at.at, at.at - a.width);
  } else {
    if (!before && set(-1, -1)) join(label, at.at, at.at - a.width - 1);
    if (set(-1, 1) && !set(0, 1)) join(label, at.at, at.at - a.width + 1);
  }
}

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ ComponentsArgs a) {
  grid_dependency_release();
  const Place at = place_of(a);
  grid_dependency_wait();
  int32_t* const label = a.label + at.n * a.area;
  const Run run = run_of(at.inside && label[at.at] >= 0);
  const int lane = threadIdx.x % 32;
  if (!(run.bits >> lane & 1) || lane != run.first) return;
  const int root = root_of(label, at.at);
  label[at.at] = root;
  atomicAdd(a.rank + at.n * a.area + root, run.end - run.first);
}

// How many pixels of a thread's share of a chunk are first ones of components that count. each(pixel, pixels) is told.
template <class Each>
__device__ __forceinline__ int components_of(const ComponentsArgs& a, int64_t n, int chunk, const Each& each) {
  const int begin = chunk * kComponentsChunk + static_cast<int>(threadIdx.x) * kEach, end = min(begin + kEach, a.area);
  const int32_t *label = a.label + n * a.area, *rank = a.rank + n * a.area;
  int found = 0;
  for (int at = begin; at < end; ++at) {
    if (label[at] != at) continue;
    const int pixels = rank[at];
    const bool counts = pixels >= a.p.smallest;
    each(at, pixels, counts);
    found += counts;
  }
  return found;
}

__global__ void __launch_bounds__(kThreads) tally_kernel(const __grid_constant__ ComponentsArgs a) {
  __shared__ int sums[kWarps];
  grid_dependency_release();
  const int n = blockIdx.x / a.chunks, chunk = static_cast<int>(blockIdx.x) - n * a.chunks;
  grid_dependency_wait();
  int all;
  sum_before<kThreads>(components_of(a, n, chunk, [](int, int, bool) {}), sums, &all);
  if (threadIdx.x == 0) a.tally[blockIdx.x] = all;
}

__device__ __forceinline__ void start_row(const ComponentsParams& p, int64_t row, int4 box, int pixels) {
  reinterpret_cast<int4*>(p.boxes)[row] = box;
  p.pixels[row] = pixels, p.sums[row] = 0;
}

__global__ void __launch_bounds__(kThreads) rank_kernel(const __grid_constant__ ComponentsArgs a) {
  __shared__ int sums[3][kWarps];
  grid_dependency_release();
  const int n = blockIdx.x / a.chunks, chunk = static_cast<int>(blockIdx.x) - n * a.chunks;
  const int64_t rows = static_cast<int64_t>(n) * a.p.capacity;
  grid_dependency_wait();
  int earlier = 0, all = 0, before, total, own;
  for (int c = threadIdx.x; c < a.chunks; c += kThreads) {
    const int there = a.tally[n * a.chunks + c];
    all += there, earlier += c < chunk ? there : 0;
  }
  sum_before<kThreads>(earlier, sums[0], &before);
  sum_before<kThreads>(all, sums[1], &total);
  int at = before + sum_before<kThreads>(components_of(a, n, chunk, [](int, int, bool) {}), sums[2], &own);
  components_of(a, n, chunk, [&](int pixel, int pixels, bool counts) {
    const int y = pixel / a.width;
    const bool kept = counts && at < a.p.capacity;
    a.rank[static_cast<int64_t>(n) * a.area + pixel] = kept ? at : -1;
    if (kept) start_row(a.p, rows + at, make_int4(a.width, y, 0, 0), pixels);
    at += counts;
  });
  if (chunk < a.chunks - 1) return;
  for (int64_t k = total + static_cast<int64_t>(threadIdx.x); k < a.p.capacity; k += kThreads)
    start_row(a.p, rows + k, make_int4(0, 0, 0, 0), 0);
  if (threadIdx.x == 0) a.p.count[n] = total;
}

template <class T>
__global__ void __launch_bounds__(kThreads) measure_kernel(const __grid_constant__ ComponentsArgs a) {
  grid_dependency_release();
  const Place at = place_of(a);
  grid_dependency_wait();
  const bool set = at.inside && a.label[at.n * a.area + at.at] >= 0;
  const Run run = run_of(set);
  if (!run.bits) return;
  const int lane = threadIdx.x % 32;
  unsigned long long sum = set ? static_cast<unsigned long long>(level_of(score_at<T>(a, at))) : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  const unsigned long long until = __shfl_sync(~0u, sum, max(run.end - 1, 0));
  const unsigned long long before = __shfl_up_sync(~0u, sum, 1);
  if (!set || lane != run.first) return;
  const int32_t rank = a.rank[at.n * a.area + a.label[at.n * a.area + at.at]];
  if (rank < 0) return;
  const int64_t row = at.n * a.p.capacity + rank;
  int32_t* const box = a.p.boxes + row * 4;
  atomicMin(box, at.x);
  atomicMax(box + 2, at.x + run.end - run.first);
  atomicMax(box + 3, at.y + 1);
  atomicAdd(reinterpret_cast<unsigned long long*>(a.p.sums + row), until - (lane ? before : 0));
}

template <class T>
cudaError_t launch(const ComponentsArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int images = static_cast<int>(a.p.images());
  const dim3 pixels(images * a.parts), chunks(images * a.chunks), threads(kThreads);
  const auto call = [&](auto kernel, dim3 ctas) {
    return launch_dependent(device, kernel, ctas, threads, 0, stream, a);
  };
  const auto first_of = [](std::initializer_list<cudaError_t> all) {
    for (const cudaError_t error : all)
      if (error != cudaSuccess) return error;
    return cudaSuccess;
  };
  return first_of({call(label_kernel<T>, pixels), call(join_kernel, pixels), call(count_kernel, pixels),
                   call(tally_kernel, chunks), call(rank_kernel, chunks), call(measure_kernel<T>, pixels)});
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_components_cuda(const sbnet::ComponentsParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  constexpr const char* kOp = "connected_components";
  const ComponentsParams& p = *params;
  SBNET_TRY(validate(p));
  if (p.images() == 0) return ok_status();
  ComponentsArgs a = {};
  a.p = p;
  a.height = static_cast<int>(p.scores.size[2]), a.width = static_cast<int>(p.scores.size[3]);
  a.area = static_cast<int>(p.area());
  const int64_t of_row = (p.scores.size[3] + 31) / 32, words = of_row * p.scores.size[2];
  a.words_of_row = FastDiv(static_cast<uint32_t>(of_row > 0 ? of_row : 1));
  a.words = static_cast<int>(words), a.parts = static_cast<int>(words / kWarps + 1);
  a.chunks = a.area / kComponentsChunk + 1;
  SBNET_CHECK(size_product({p.images(), a.parts}) <= INT32_MAX && size_product({p.images(), a.chunks}) <= INT32_MAX,
              "%s: scores: expected fewer images, got %lld of %dx%d", kOp, static_cast<long long>(p.images()), a.height,
              a.width);
  a.label = static_cast<int32_t*>(workspace);
  a.rank = a.label + p.images() * p.area();
  a.tally = a.rank + p.images() * p.area();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  SBNET_CUDA_TRY(kOp, by_dtype(p.scores.dtype, [&](auto t) { return launch<decltype(t)>(a, device, stream); }));
  return ok_status();
}
