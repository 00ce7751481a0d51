// RegisterCustomOps: what ONNX Runtime calls when it is given libsbnet.so as a custom op library.
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

#include "ort_binding/common.h"

extern "C" SBNET_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace sbnet::ort;
  const void* const* slots = base->GetApi(kApiVersion);
  if (!slots) {
    // CreateStatus is the first function of every version.
    const void* const* oldest = base->GetApi(1);
    if (!oldest) return nullptr;
    const auto create = reinterpret_cast<decltype(Api::CreateStatus)>(const_cast<void*>(oldest[0]));
    return create(kNotImplemented, "sbnet: ONNX Runtime 1.18 or newer is wanted");
  }
  static std::mutex mutex;
  static auto& runtimes = *new std::map<const OrtApiBase*, std::unique_ptr<Runtime>>;  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Runtime>& found = runtimes[base];
  std::unique_ptr<Runtime> made;
  if (!found) made = std::make_unique<Runtime>(Runtime{load_api(slots), false, nullptr});
  Runtime& runtime = found ? *found : *made;
  return guarded(runtime, [&] {
    if (made) {
      int major = 0, minor = 0;
      std::sscanf(base->GetVersionString(), "%d.%d", &major, &minor);
      runtime.infers_absent_inputs = major > 1 || minor >= 24;
      check(api->CreateCustomOpDomain("sbnet", &runtime.domain));
      add_reduce_mask_ops(runtime);
      add_fringe_ops(runtime);
      add_pyramid_ops(runtime);
      add_gather_scatter_ops(runtime);
      add_fill_ops(runtime);
      add_conv_ops(runtime);
      add_bottleneck_ops(runtime);
      add_pool_ops(runtime);
      add_blocksparse_ops(runtime);
      found = std::move(made);
    }
    check(api->AddCustomOpDomain(options, runtime.domain));
  });
}
