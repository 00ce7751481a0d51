// The fringe of a tensor: the pixels that a consumer's active blocks read and no active block of the producer writes.
// They must read as zero; a producing layer zeroes them while it writes its blocks (FringeView in core/conv.h).
#pragma once
#include "core/fastdiv.h"
#include "core/types.h"

namespace sbnet {

struct FringeParams {
  ActiveView producer;                                    // tiling grid of the tensor's own plane; needs block_map
  ActiveView consumer;                                    // tiling grid of the consumer's output plane; needs block_map
  int64_t batch, height, width;                           // of the tensor
  int64_t out_height, out_width;                          // of the consumer's output
  int32_t kernel[2], stride[2], padding[2], dilation[2];  // of the consumer
  int64_t capacity;
  int32_t* pixels;  // [capacity] out: linear indices (n*height + y)*width + x, ascending, then -1
  int32_t* count;   // [1] out: min(fringe pixels, capacity)
};

SBNET_EXPORT Status validate(const FringeParams& p);

// The membership test that both devices share.
class FringeTest {
 public:
  explicit FringeTest(const FringeParams& p) : p_(p) {
    for (int d = 0; d < 2; ++d) {
      mine_[d] = FastDiv(p.producer.grid.size[d]);
      theirs_[d] = FastDiv(p.consumer.grid.size[d]);
      stride_[d] = FastDiv(p.stride[d]);
    }
  }

  // Is pixel (n, y, x) of the tensor in the fringe?
  SBNET_HOST_DEVICE bool operator()(int n, int y, int x) const {
    const BlockGrid &mine = p_.producer.grid, &theirs = p_.consumer.grid;
    const int64_t own = (static_cast<int64_t>(n) * mine.count[0] + mine_[0].quotient(y)) * mine.count[1];
    if (p_.producer.block_map[own + mine_[1].quotient(x)] >= 0) return false;
    const int32_t* map = p_.consumer.block_map + static_cast<int64_t>(n) * theirs.count[0] * theirs.count[1];
    return any_reader(0, y, [&](int i) {
      return any_reader(1, x, [&](int j) { return map[static_cast<int64_t>(i) * theirs.count[1] + j] >= 0; });
    });
  }

 private:
  // Calls visit(block) for each block along dimension d whose outputs read coordinate v, until visit returns true.
  template <class Visit>
  SBNET_HOST_DEVICE bool any_reader(int d, int v, Visit visit) const {
    const int limit = static_cast<int>(d == 0 ? p_.out_height : p_.out_width);
    int last = -1;
    for (int tap = 0; tap < p_.kernel[d]; ++tap) {
      const int t = v + p_.padding[d] - tap * p_.dilation[d];
      if (t < 0) break;
      uint32_t out, rest;
      stride_[d].divmod(t, &out, &rest);
      if (rest || static_cast<int>(out) >= limit) continue;
      const int block = static_cast<int>(theirs_[d].quotient(out));
      if (block != last && visit(block)) return true;
      last = block;
    }
    return false;
  }

  FringeParams p_;
  FastDiv mine_[2], theirs_[2], stride_[2];
};

}  // namespace sbnet

extern "C" {
SBNET_EXPORT int64_t sbnet_fringe_workspace_bytes(const sbnet::FringeParams* p);
SBNET_EXPORT sbnet::Status sbnet_fringe_cpu(const sbnet::FringeParams* p, void* workspace,
                                            const sbnet::Parallel* parallel);
SBNET_EXPORT sbnet::Status sbnet_fringe_cuda(const sbnet::FringeParams* p, void* workspace, void* stream);
}
