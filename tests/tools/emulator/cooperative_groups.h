// The barrier of a grid, for grids that machine.h runs as a whole.
#pragma once
#include <utility>

namespace cooperative_groups {

struct Grid {
  unsigned barrier_arrive() const {
    emulator::Cluster& all = *emulator::self->cta->cluster;
    __syncthreads();
    const unsigned generation = all.meeting.generation;
    if (threadIdx.x == 0 && ++all.meeting.arrived == static_cast<int>(all.ctas.size()))
      all.meeting.arrived = 0, ++all.meeting.generation;
    return generation;
  }
  void barrier_wait(unsigned generation) const {
    if (threadIdx.x == 0)
      emulator::wait_until("barrier of the grid",
                           [&] { return emulator::self->cta->cluster->meeting.generation != generation; });
    __syncthreads();
  }
};
inline Grid this_grid() { return {}; }

}  // namespace cooperative_groups
