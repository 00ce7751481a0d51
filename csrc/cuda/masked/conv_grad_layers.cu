// sparse_conv2d_weight_grads on every CUDA device since sm_80: which kernel takes a layer, which layers share a launch,
// and into how many parts they are cut.
#include "cuda/masked/conv_grad.cuh"

namespace sbnet::portable {
namespace {

// CTAs of the same work that a slot of the device takes. More of them store more parts, which took longer.
constexpr int64_t kWaves = 2;

// First match wins.
const GradKernel& kernel_of(const ConvWeightGradParams& p) {
  if (is_depthwise(p.conv.weight, p.conv.groups)) return kGradDepthwise;
  if (grad_cells_takes(p)) return kGradCells;
  if (grad_rows_takes(p)) return kGradRows;
  return grad_few_takes(p) ? kGradFew : kGradElements;
}

// With strides in whole words even of dimensions that have one element.
ConvWeightGradParams regular(const ConvWeightGradParams& params) {
  ConvWeightGradParams p = params;
  for (TensorView* t : {&p.conv.x, &p.conv.y}) {
    const PixelStrides s = pixel_strides(*t);
    if (channels_vectorize(*t)) t->stride[0] = s.n, t->stride[2] = s.y, t->stride[3] = s.x;
  }
  return p;
}

bool adds(const GradKernel& kernel, const GradParts& parts) { return parts.stored() > 1 || &kernel == &kGradDepthwise; }

// Parts of layers that share a launch: of equal work, whatever the layer.
void cut_together(const GradKernel& kernel, GradWork* layers, int count, const DeviceInfo& device) {
  int64_t chunks[kGradTogether], all = 0;
  for (int k = 0; k < count; ++k) {
    const ConvWeightGradParams& p = layers[k].params;
    chunks[k] = kernel.parts(p, device, 1).chunks(p.conv.active.capacity);
    all += chunks[k] * kernel.tiles(p);
  }
  const int64_t share = std::max<int64_t>(all / (kWaves * grad_slots(device)), 1);
  for (int k = 0; k < count; ++k)
    layers[k].parts = kernel.parts(layers[k].params, device, std::max<int64_t>((chunks[k] + share - 1) / share, 1));
}

// Calls visit(kernel, layers, count) for each launch. Workspaces lie one after the other; their floats.
template <class Visit>
Status each_launch(const ConvWeightGradsParams& p, float* workspace, const DeviceInfo& device, int64_t* floats,
                   const Visit& visit) {
  bool taken[kMostWeightGrads] = {};
  *floats = 0;
  for (int64_t first = 0; first < p.count; ++first) {
    if (taken[first]) continue;
    GradWork layers[kGradTogether];
    const GradKernel& kernel = kernel_of(p.layers[first]);
    const int variant = kernel.variant ? kernel.variant(p.layers[first]) : 0;
    int count = 0;
    for (int64_t k = first; k < p.count && count < (kernel.variant ? kGradTogether : 1); ++k) {
      if (taken[k] || &kernel_of(p.layers[k]) != &kernel) continue;
      if (kernel.variant && kernel.variant(p.layers[k]) != variant) continue;
      taken[k] = true;
      layers[count++].params = regular(p.layers[k]);
    }
    if (count > 1)
      cut_together(kernel, layers, count, device);
    else
      layers[0].parts = kernel.parts(layers[0].params, device, 0);
    for (int k = 0; k < count; ++k) {
      layers[k].workspace = workspace + *floats;
      const int64_t outputs = layers[k].params.conv.weight.size[0];
      if (adds(kernel, layers[k].parts)) *floats += (layers[k].parts.workspace_floats(outputs) + 3) / 4 * 4;
    }
    SBNET_TRY(visit(kernel, layers, count));
  }
  return ok_status();
}

}  // namespace
}  // namespace sbnet::portable

int64_t sbnet_sparse_conv2d_weight_grads_workspace_bytes_cuda(const sbnet::ConvWeightGradsParams* params) {
  using namespace sbnet;
  using namespace sbnet::portable;
  DeviceInfo device = {};
  if (!validate(*params).ok() || !current_device(kGradOp, &device).ok()) return 0;  // the launch says so
  int64_t floats = 0;
  const auto nothing = [](const GradKernel&, const GradWork*, int) { return ok_status(); };
  return each_launch(*params, nullptr, device, &floats, nothing).ok() ? 4 * floats : 0;
}

sbnet::Status sbnet_sparse_conv2d_weight_grads_cuda(const sbnet::ConvWeightGradsParams* params, void* workspace,
                                                    void* stream_handle) {
  using namespace sbnet;
  using namespace sbnet::portable;
  SBNET_TRY(validate(*params));
  DeviceInfo device;
  SBNET_TRY(current_device(kGradOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  GradAdder adder(device, stream);
  const auto launch = [&](const GradKernel& kernel, const GradWork* layers, int count) -> Status {
    SBNET_TRY(kernel.launch(layers, count, device, stream));
    for (int k = 0; k < count; ++k)
      if (adds(kernel, layers[k].parts)) SBNET_TRY(adder.add(layers[k]));
    return ok_status();
  };
  int64_t floats = 0;
  SBNET_TRY(each_launch(*params, static_cast<float*>(workspace), device, &floats, launch));
  return adder.flush();
}
