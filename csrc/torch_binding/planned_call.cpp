// What a call of a planned network does on the host beside its kernels, for all tensors at once: from Python each costs
// as much as a launch. Python calls these C functions (sbnet/graph/writes.py, sbnet/engine/inputs.py).
#include <dlfcn.h>

#include "core/masked/copies.h"
#include "torch_binding/common.h"

extern "C" {
// How often tensors were written, as PyTorch counts, summed; -1 where this PyTorch does not tell. Each is a
// c10::TensorImpl*, which is all that an at::TensorBase holds.
SBNET_EXPORT int64_t sbnet_count_writes(void* const* tensors, int64_t count);
// Is the item keys[k] of each dict the object values[k]? `get` is PyDict_GetItemWithError; the caller holds the GIL.
SBNET_EXPORT bool sbnet_items_are(void* (*get)(void* dict, void* key), void* const* dicts, void* const* keys,
                                  void* const* values, int64_t count);
// Copies bytes[k] from `from[k]`, unless that is null, to `to[k]` on the device's current stream; where bytes[k] is
// negative, the address from[k] itself. Null, or what is wrong, until the thread's next call.
SBNET_EXPORT const char* sbnet_copy_inputs(void* const* to, void* const* from, const int64_t* bytes, int64_t count,
                                           int32_t device);
}

int64_t sbnet_count_writes(void* const* tensors, int64_t count) {
  // The stable ABI has no getter of it. This one, int64_t at::TensorBase::_version() const, is as old as TensorBase.
  using Getter = int64_t (*)(void* const*);
  static const Getter getter = []() -> Getter {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "_ZNK2at10TensorBase8_versionEv")) : nullptr;
  }();
  if (!getter) return -1;
  int64_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += getter(tensors + k);
  return sum;
}

bool sbnet_items_are(void* (*get)(void* dict, void* key), void* const* dicts, void* const* keys, void* const* values,
                     int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    if (get(dicts[k], keys[k]) != values[k]) return false;
  return true;
}

const char* sbnet_copy_inputs(void* const* to, void* const* from, const int64_t* bytes, int64_t count, int32_t device) {
  thread_local std::string wrong;
  try {
#ifdef SBNET_WITH_CUDA
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = sbnet::binding::current_stream("run", device);
    sbnet::CopiesParams p = {};
    for (int64_t k = 0; k < count; ++k) {
      if (from[k]) {
        p.to[p.count] = to[k], p.from[p.count] = from[k], p.address[p.count] = bytes[k] < 0;
        p.bytes[p.count] = bytes[k] < 0 ? static_cast<int64_t>(sizeof(void*)) : bytes[k];
        ++p.count;
      }
      if (p.count < sbnet::kMostCopies && k + 1 < count) continue;
      sbnet::check(sbnet_copies_cuda(&p, stream));
      p.count = 0;
    }
    return nullptr;
#else
    (void)to, (void)from, (void)bytes, (void)count;
    sbnet::raise_expected("run", "device", "a build with CUDA, got one without, and device ", device);
#endif
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  return wrong.c_str();
}
