#include "core/masked/resize.h"

#include <cstring>

#include "core/layer.h"

namespace sbnet {

constexpr const char* kOp = "sparse_resize2d";

Status read_resize_mode(const char* op, const char* name, ResizeMode* mode) {
  constexpr const char* kNames[] = {"nearest", "nearest-exact", "bilinear", "bicubic"};
  for (int k = 0; k < 4; ++k)
    if (!std::strcmp(name, kNames[k])) {
      *mode = static_cast<ResizeMode>(k);
      return ok_status();
    }
  return SBNET_INVALID("%s: mode: expected nearest, nearest-exact, bilinear or bicubic, got '%.64s'", op, name);
}

Status validate(const ResizeParams& p) {
  SBNET_TRY(check_input(kOp, p.x));
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(p.y.size[2 + d] >= 1 && p.y.size[2 + d] < (1 << 24) && p.x.size[2 + d] < (1 << 24),
                "%s: size: expected sides of 1 to 2^24 - 1, got %lld from %lld", kOp,
                static_cast<long long>(p.y.size[2 + d]), static_cast<long long>(p.x.size[2 + d]));
    SBNET_CHECK(p.ratio[d] >= 0 && p.ratio[d] < (1 << 24), "%s: scale_factor: expected 2^-24 at least, got 1 / %g", kOp,
                static_cast<double>(p.ratio[d]));
  }
  SBNET_CHECK(!p.align_corners || p.mode == ResizeMode::kBilinear || p.mode == ResizeMode::kBicubic,
              "%s: align_corners: expected false of the nearest modes, got true", kOp);
  const LayerShape out = {{p.x.size[0], p.x.size[1], p.y.size[2], p.y.size[3]}, "N, C, H_out, W_out"};
  return check_layer(kOp, p.x, p.y, out, p.active, p.fringe);
}

}  // namespace sbnet
