// Where a call runs: torch's stream and its threads.
#include <dlfcn.h>

#include <atomic>

#include "torch_binding/common.h"

namespace sbnet::binding {

// The stable ABI has no stream getter that 2.10 knows: libtorch_cuda's C shim has one, absent in CPU-only torch.
void* current_stream(const char* op, int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = []() -> Getter {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  SBNET_TORCH_EXPECT(getter, op, "device", "a torch with CUDA, got one without");
  void* stream = nullptr;
  // Compared by hand: torch's macros for it have changed their names between releases.
  SBNET_TORCH_EXPECT(getter(device, &stream) == 0, op, "device", "a current stream, got none on device ", device);
  return stream;
}

namespace {
std::atomic<bool> ran_in_parallel = false;
}

Parallel cpu_threads() {
  const auto run = [](void*, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* arg) {
    ran_in_parallel.store(true, std::memory_order_relaxed);
    torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(arg, begin, end); });
  };
  return Parallel{run, nullptr, static_cast<int32_t>(torch::stable::get_num_threads())};
}

}  // namespace sbnet::binding

extern "C" SBNET_EXPORT bool sbnet_ran_in_parallel() { return sbnet::binding::ran_in_parallel.load(); }
