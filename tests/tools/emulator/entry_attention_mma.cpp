// What test_attention_emulated.py calls: the kernels for every GPU since sm_80.
#include <cstdio>

#include "cuda/attention/portable.cuh"
#include "machine.h"

namespace {

const char* run(sbnet::Status valid, int multiprocessors, int seed, char* message, int64_t room, int64_t bytes,
                const std::function<sbnet::Status(void*, const sbnet::DeviceInfo&)>& f) {
  emulator::multiprocessors = multiprocessors;
  emulator::random.seed(seed);
  if (valid.ok()) {
    std::vector<uint8_t> workspace(bytes + 256, 0xff);
    uint8_t* aligned = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
    valid = f(aligned, sbnet::DeviceInfo{0, multiprocessors, 80});
  }
  std::snprintf(message, room, "%s", valid.message);
  return valid.ok() ? nullptr : message;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int emulate_attention(const sbnet::AttentionParams* p, int multiprocessors,
                                                             int seed, char* message, int64_t room) {
  using namespace sbnet;
  return run(validate(*p), multiprocessors, seed, message, room, 0,
             [&](void*, const DeviceInfo& device) { return portable::launch_attention_mma(*p, device, nullptr); })
             ? 2
             : 0;
}

__attribute__((visibility("default"))) int emulate_attention_backward(const sbnet::AttentionBackwardParams* p,
                                                                      int multiprocessors, int seed, char* message,
                                                                      int64_t room) {
  using namespace sbnet;
  return run(validate(*p), multiprocessors, seed, message, room, portable::attention_backward_mma_bytes(p->forward),
             [&](void* workspace, const DeviceInfo& device) {
               return portable::launch_attention_backward_mma(*p, workspace, device, nullptr);
             })
             ? 2
             : 0;
}
}
