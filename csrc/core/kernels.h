// An op's kernels, as its bindings call them.
#pragma once
#include <type_traits>

#include "core/types.h"

namespace sbnet {

// One for the CPU, and one for CUDA or null where the library has none: SBNET_KERNELS(fringe).
template <class Cpu, class Cuda>
struct Kernels {
  Cpu cpu;
  Cuda cuda;
  // Runs the one for where `on` is: with cuda(), stream() and parallel(), as bindings call them.
  template <class On, class... Arguments>
  Status operator()(const On& on, const Arguments&... arguments) const {
    if constexpr (!std::is_null_pointer_v<Cuda>)
      if (on.cuda()) return cuda(arguments..., on.stream());
    const Parallel parallel = on.parallel();
    return cpu(arguments..., &parallel);
  }
  // The same of their workspace's bytes, which depend on how many threads a CPU has.
  template <class On, class... Arguments>
  int64_t bytes(const On& on, const Arguments&... arguments) const {
    if constexpr (!std::is_null_pointer_v<Cuda>)
      if (on.cuda()) return cuda(arguments...);
    return cpu(arguments..., on.parallel().threads);
  }
};
template <class Cpu, class Cuda>
Kernels(Cpu, Cuda) -> Kernels<Cpu, Cuda>;

}  // namespace sbnet

// Declares an op's kernels, C functions: sbnet_OP_cpu(p, parallel) and sbnet_OP_cuda(p, stream).
#define SBNET_DECLARE(op, Params)                                                                       \
  extern "C" {                                                                                          \
  SBNET_EXPORT sbnet::Status sbnet_##op##_cpu(const sbnet::Params* p, const sbnet::Parallel* parallel); \
  SBNET_EXPORT sbnet::Status sbnet_##op##_cuda(const sbnet::Params* p, void* stream);                   \
  }
// The same with a workspace before the last argument. It holds anything at the call and is aligned as allocators do it.
#define SBNET_DECLARE_WITH_WORKSPACE(op, Params)                                                       \
  extern "C" {                                                                                         \
  SBNET_EXPORT int64_t sbnet_##op##_workspace_bytes(const sbnet::Params* p);                           \
  SBNET_EXPORT sbnet::Status sbnet_##op##_cpu(const sbnet::Params* p, void* workspace,                 \
                                              const sbnet::Parallel* parallel);                        \
  SBNET_EXPORT sbnet::Status sbnet_##op##_cuda(const sbnet::Params* p, void* workspace, void* stream); \
  }
// The same where the CPU's threads and the device decide how many bytes.
#define SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(op, Params)                                             \
  extern "C" {                                                                                         \
  SBNET_EXPORT int64_t sbnet_##op##_workspace_bytes_cpu(const sbnet::Params* p, int32_t threads);      \
  SBNET_EXPORT int64_t sbnet_##op##_workspace_bytes_cuda(const sbnet::Params* p);                      \
  SBNET_EXPORT sbnet::Status sbnet_##op##_cpu(const sbnet::Params* p, void* workspace,                 \
                                              const sbnet::Parallel* parallel);                        \
  SBNET_EXPORT sbnet::Status sbnet_##op##_cuda(const sbnet::Params* p, void* workspace, void* stream); \
  }

#ifdef SBNET_WITH_CUDA
#define SBNET_KERNELS(op) \
  sbnet::Kernels { sbnet_##op##_cpu, sbnet_##op##_cuda }
#else
#define SBNET_KERNELS(op) \
  sbnet::Kernels { sbnet_##op##_cpu, nullptr }
#endif
