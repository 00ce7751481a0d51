// Several copies in one launch: cudaMemcpyAsync takes as long to call for one as the launch of a whole CUDA graph.
// A CTA copies kBytes of one of them, in words of 16 bytes where both addresses allow it.
#include "core/masked/copies.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // of a thread: loads in flight
constexpr int kBytes = kThreads * kWords * sizeof(uint4);

struct CopiesArgs {
  CopiesParams p;
  int64_t end[kMostCopies];  // the CTA after the last one of each copy
};

__global__ void __launch_bounds__(kThreads) copies_kernel(const __grid_constant__ CopiesArgs a) {
  grid_dependency_wait();
  grid_dependency_release();
  int k = 0;
  while (k + 1 < a.p.count && blockIdx.x >= a.end[k]) ++k;
  if (a.p.address[k]) {
    if (threadIdx.x == 0) *static_cast<const void**>(a.p.to[k]) = a.p.from[k];
    return;
  }
  const int64_t begin = (blockIdx.x - (k ? a.end[k - 1] : 0)) * kBytes;
  const int bytes = static_cast<int>(min(static_cast<int64_t>(kBytes), a.p.bytes[k] - begin));
  const char* from = static_cast<const char*>(a.p.from[k]) + begin;
  char* to = static_cast<char*>(a.p.to[k]) + begin;
  const bool aligned = !((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % sizeof(uint4));
  const int words = aligned ? bytes / static_cast<int>(sizeof(uint4)) : 0;
  uint4 word[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int at = w * kThreads + threadIdx.x;
    if (at < words) word[w] = reinterpret_cast<const uint4*>(from)[at];
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int at = w * kThreads + threadIdx.x;
    if (at < words) reinterpret_cast<uint4*>(to)[at] = word[w];
  }
  for (int at = words * static_cast<int>(sizeof(uint4)) + threadIdx.x; at < bytes; at += kThreads) to[at] = from[at];
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_copies_cuda(const sbnet::CopiesParams* params, void* stream) {
  using namespace sbnet;
  constexpr const char* kOp = "copies";
  CopiesArgs a = {*params, {}};
  SBNET_CHECK(a.p.count >= 0 && a.p.count <= kMostCopies, "%s: count: expected 0 to %d, got %d", kOp, kMostCopies,
              a.p.count);
  int64_t ctas = 0;
  for (int k = 0; k < a.p.count; ++k) a.end[k] = ctas += (a.p.bytes[k] + kBytes - 1) / kBytes;
  SBNET_CHECK(ctas <= INT32_MAX, "%s: bytes: expected fewer than %lld KiB, got %lld KiB", kOp,
              static_cast<long long>(INT32_MAX) * kBytes / 1024, static_cast<long long>(ctas) * kBytes / 1024);
  if (!ctas) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, copies_kernel, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0,
                                       static_cast<cudaStream_t>(stream), a));
  return ok_status();
}
