// The fringe on the CPU: one ordered pass over the plane.
#include "core/fringe.h"

sbnet::Status sbnet_fringe_cpu(const sbnet::FringeParams* params, void*, const sbnet::Parallel*) {
  using namespace sbnet;
  const FringeParams& p = *params;
  SBNET_TRY(validate(p));
  const FringeTest in_fringe(p);
  int64_t count = 0;
  for (int n = 0; n < p.batch; ++n)
    for (int y = 0; y < p.height; ++y)
      for (int x = 0; x < p.width; ++x)
        if (in_fringe(n, y, x) && count < p.capacity)
          p.pixels[count++] = static_cast<int32_t>((n * p.height + y) * p.width + x);
  *p.count = static_cast<int32_t>(count);
  for (int64_t k = count; k < p.capacity; ++k) p.pixels[k] = -1;
  return ok_status();
}
