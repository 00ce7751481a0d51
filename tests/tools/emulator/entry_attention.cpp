// What test_attention_emulated.py calls.
#include <cstdio>

#include "cuda/common.cuh"
#include "cuda/sm90/attention/attention.h"
#include "machine.h"

namespace {

template <class Bytes, class Run>
int emulate(bool takes, int multiprocessors, int seed, char* message, int64_t room, Bytes&& bytes, Run&& run) {
  emulator::multiprocessors = multiprocessors;
  emulator::random.seed(seed);
  if (!takes) return 1;
  std::vector<uint8_t> workspace(bytes() + 256, 0xff);
  uint8_t* aligned = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
  const sbnet::Status status = run(aligned, sbnet::DeviceInfo{multiprocessors, multiprocessors, 90});
  std::snprintf(message, room, "%s", status.message);
  return status.ok() ? 0 : 2;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int emulate_attention(const sbnet::AttentionParams* p, int multiprocessors,
                                                             int seed, char* message, int64_t room) {
  using namespace sbnet;
  const Status valid = validate(*p);
  if (!valid.ok()) return std::snprintf(message, room, "%s", valid.message), 2;
  return emulate(
      sm90::block_attention_takes(*p), multiprocessors, seed, message, room,
      [&] { return sm90::block_attention_workspace_bytes(*p); },
      [&](void* workspace, const DeviceInfo& device) { return sm90::block_attention(*p, workspace, device, nullptr); });
}

__attribute__((visibility("default"))) int emulate_attention_backward(const sbnet::AttentionBackwardParams* p,
                                                                      int multiprocessors, int seed, char* message,
                                                                      int64_t room) {
  using namespace sbnet;
  const Status valid = validate(*p);
  if (!valid.ok()) return std::snprintf(message, room, "%s", valid.message), 2;
  return emulate(
      sm90::block_attention_backward_takes(*p), multiprocessors, seed, message, room,
      [&] { return sm90::block_attention_backward_workspace_bytes(*p); },
      [&](void* workspace, const DeviceInfo& device) {
        return sm90::block_attention_backward(*p, workspace, device, nullptr);
      });
}
}
