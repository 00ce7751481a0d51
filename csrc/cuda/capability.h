// Which kernels a device gets: its own, or those of every GPU since sm_80.
#pragma once
#include "cuda/common.cuh"

namespace sbnet {

// The device's compute capability, as 90, to choose kernels by; 0 where SBNET_GPU=portable, or a build without Hopper's
// kernels, keeps every op to the portable ones. (What a launch may ask of the device is DeviceInfo's to say.)
int32_t select_capability(const DeviceInfo& device);

// May CTAs be launched in clusters? Not before sm_90, nor where SBNET_GPU=portable.
bool has_clusters(const DeviceInfo& device);

}  // namespace sbnet
