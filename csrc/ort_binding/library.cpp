// RegisterCustomOps: what ONNX Runtime calls when it is given libsbnet.so as a custom op library.
#include <cstdio>

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
  // Once a process: sessions keep pointing at the domain and its ops.
  static const Api loaded = api = load_api(slots);
  static_cast<void>(loaded);
  return guarded([&] {
    static OrtCustomOpDomain* const domain = [&] {
      int major = 0, minor = 0;
      std::sscanf(base->GetVersionString(), "%d.%d", &major, &minor);
      infers_absent_inputs = major > 1 || minor >= 24;
      OrtCustomOpDomain* made = nullptr;
      check(api.CreateCustomOpDomain("sbnet", &made));
      add_blocks_ops(made);
      add_bottleneck_ops(made);
      add_conv_ops(made);
      add_fill_ops(made);
      add_fringe_ops(made);
      add_pool_ops(made);
      add_pyramid_ops(made);
      return made;
    }();
    check(api.AddCustomOpDomain(options, domain));
  });
}
