// RegisterCustomOps: what ONNX Runtime calls when it is given libsbnet.so as a custom op library.
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

#include "ort_binding/common.h"

namespace sbnet::ort {

static std::vector<AddOps>& registered() {
  static auto& all = *new std::vector<AddOps>;  // never destroyed
  return all;
}
bool register_ops(AddOps add) {
  registered().push_back(add);
  return true;
}
void add_registered_ops(const Runtime& runtime) {
  for (const AddOps add : registered()) add(runtime);
}

}  // namespace sbnet::ort

extern "C" SBNET_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace sbnet::ort;
  const void* const* slots = base->GetApi(kApiVersion);
  if (!slots) {
    // CreateStatus is the first function of every version.
    const void* const* oldest = base->GetApi(1);
    if (!oldest) return nullptr;
    const auto create = reinterpret_cast<decltype(Api::CreateStatus)>(const_cast<void*>(oldest[0]));
    return create(kNotImplemented, "sbnet: expected ONNX Runtime 1.18 or newer, got an older one");
  }
  static std::mutex mutex;
  static auto& runtimes = *new std::map<const OrtApiBase*, std::unique_ptr<Runtime>>;  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Runtime>& found = runtimes[base];
  std::unique_ptr<Runtime> made;
  if (!found) made = std::make_unique<Runtime>(Runtime{load_api(slots), false, nullptr, nullptr});
  Runtime& runtime = found ? *found : *made;
  return guarded(runtime, [&] {
    if (made) {
      int major = 0, minor = 0;
      std::sscanf(base->GetVersionString(), "%d.%d", &major, &minor);
      runtime.infers_absent_inputs = major > 1 || minor >= 24;
      check(api->CreateCustomOpDomain("sbnet", &runtime.domain));
      add_registered_ops(runtime);
      found = std::move(made);
    }
    check(api->AddCustomOpDomain(options, runtime.domain));
  });
}
