// What test_components_emulated.py calls.
#include <cstdio>
#include <vector>

#include "core/frames/components.h"
#include "cuda/common.cuh"
#include "machine.h"

// sizes: of scores [N,1,H,W], and strides.
extern "C" __attribute__((visibility("default"))) int emulate_components(
    int32_t seed, void* scores, const int64_t* sizes, int32_t dtype, float least, int64_t smallest, int64_t capacity,
    int32_t* boxes, int32_t* pixels, int64_t* sums, int32_t* count, char* message, int64_t room) {
  using namespace sbnet;
  emulator::multiprocessors = 3;
  emulator::random.seed(seed);
  ComponentsParams p = {
      {scores, {}, {}, static_cast<DType>(dtype)}, least, smallest, capacity, boxes, pixels, sums, count};
  for (int d = 0; d < 4; ++d) p.scores.size[d] = sizes[d], p.scores.stride[d] = sizes[4 + d];
  std::vector<uint4> workspace(sbnet_components_workspace_bytes(&p) / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
  const Status status = sbnet_components_cuda(&p, workspace.data(), nullptr);
  std::snprintf(message, room, "%s", status.message);
  return !status.ok();
}
