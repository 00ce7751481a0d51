// Every schema of torch.ops.sbnet, and where a call runs. Python wrappers: sbnet/ops/, one file per family.
#include <dlfcn.h>

#include "torch_binding/common.h"

// `grid` is always bsize, bstride, boffset, bcount (eight numbers), `window` num, den, lo, hi, step (ten). Ops that end
// in _ write the tensor marked (a!).
STABLE_TORCH_LIBRARY(sbnet, m) {
  m.def(
      "reduce_mask(Tensor mask, SymInt[] grid, float tol, bool avgpool, SymInt capacity) "
      "-> (Tensor indices, Tensor count, Tensor total, Tensor block_map)");
  m.def(
      "sparse_gather(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, bool transpose, "
      "bool zero_tail) -> Tensor");
  m.def(
      "sparse_scatter(Tensor blocks, Tensor indices, Tensor count, Tensor block_map, Tensor base, SymInt[] grid, "
      "bool add, bool atomic, bool transpose) -> Tensor");
  m.def(
      "sparse_scatter_(Tensor blocks, Tensor indices, Tensor count, Tensor block_map, Tensor(a!) base, SymInt[] grid, "
      "bool add, bool atomic, bool transpose) -> ()");
  m.def("sparse_fill(Tensor x, Tensor block_map, SymInt[] grid, float value) -> Tensor");
  m.def("sparse_fill_(Tensor(a!) x, Tensor block_map, SymInt[] grid, float value) -> ()");
  m.def(
      "fringe(Tensor producer_map, Tensor consumer_map, SymInt[] size, SymInt[] producer_grid, "
      "SymInt[] consumer_size, SymInt[] consumer_grid, SymInt[] window, SymInt capacity) "
      "-> (Tensor pixels, Tensor count)");
  m.def(
      "motion_mask(Tensor frame, Tensor background, float threshold, float rate, float cut, SymInt smooth) "
      "-> (Tensor mask, Tensor next)");
  m.def(
      "motion_mask_(Tensor frame, Tensor(a!) background, float threshold, float rate, float cut, SymInt smooth) "
      "-> Tensor");
  m.def("mask_pyramid(Tensor mask, SymInt[] planes, float tol, SymInt[] fringes) -> Tensor[]");
  m.def(
      "sparse_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "Tensor block_map, SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
      "str activation, float activation_param, bool allow_tf32) -> Tensor");
  m.def(
      "sparse_conv2d_(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
      "str activation, float activation_param, bool allow_tf32, Tensor(a!) out, Tensor? fringe_pixels, "
      "Tensor? fringe_count, Tensor? packed=None) -> ()");
  m.def(
      "sparse_bottleneck2d(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Tensor? bias1, Tensor? bias2, "
      "Tensor? bias3, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, str activation, "
      "float activation_param, bool allow_tf32) -> Tensor");
  m.def(
      "sparse_bottleneck2d_(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Tensor? bias1, Tensor? bias2, "
      "Tensor? bias3, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, str activation, "
      "float activation_param, bool allow_tf32, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()");
  m.def(
      "sparse_conv_transpose2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "Tensor block_map, SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, "
      "SymInt[] dilation, SymInt groups, str activation, float activation_param, bool allow_tf32) -> Tensor");
  m.def(
      "sparse_conv_transpose2d_(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, SymInt groups, "
      "str activation, float activation_param, bool allow_tf32, Tensor(a!) out, Tensor? fringe_pixels, "
      "Tensor? fringe_count) -> ()");
  m.def("pack_conv_weight(Tensor weight, SymInt groups) -> Tensor");
  m.def(
      "sparse_conv2d_quantized(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, "
      "float residual_scale, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] stride, "
      "SymInt[] padding, SymInt[] dilation, str activation, float activation_param, float out_scale) -> Tensor");
  m.def(
      "sparse_conv2d_dequantized(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, "
      "float residual_scale, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] stride, "
      "SymInt[] padding, SymInt[] dilation, str activation, float activation_param) -> Tensor");
  m.def(
      "sparse_conv2d_quantized_(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, "
      "float residual_scale, Tensor indices, Tensor count, SymInt[] grid, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, str activation, float activation_param, float out_scale, Tensor(a!) out, "
      "Tensor? fringe_pixels, Tensor? fringe_count, Tensor? packed=None) -> ()");
  m.def(
      "sparse_max_pool2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, "
      "SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode) -> Tensor");
  m.def(
      "sparse_max_pool2d_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, SymInt[] kernel_size, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode, Tensor(a!) out, Tensor? fringe_pixels, "
      "Tensor? fringe_count) -> ()");
  m.def(
      "sparse_avg_pool2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, "
      "SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, bool ceil_mode, bool count_include_pad, "
      "int? divisor_override) -> Tensor");
  m.def(
      "sparse_avg_pool2d_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, SymInt[] kernel_size, "
      "SymInt[] stride, SymInt[] padding, bool ceil_mode, bool count_include_pad, int? divisor_override, "
      "Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()");
  // `ratio`: pixels of x from an output to the next, 0 where the sizes say it.
  m.def(
      "sparse_resize2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] output_size, "
      "str method, bool align_corners, float ratio_h, float ratio_w) -> Tensor");
  m.def(
      "sparse_resize2d_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, str method, bool align_corners, "
      "float ratio_h, float ratio_w, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()");
  // `program`: steps, see core/masked/pointwise.h. Sides of 1 of a, b, c and d stand for those of x.
  m.def(
      "sparse_pointwise(Tensor x, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor indices, Tensor count, "
      "Tensor block_map, SymInt[] grid, str program) -> Tensor");
  m.def(
      "sparse_pointwise_(Tensor x, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor indices, Tensor count, "
      "SymInt[] grid, str program, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()");
  // `pad`: left, right, top, bottom, as in F.pad.
  m.def(
      "sparse_rearrange(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, int up, int down, "
      "int groups, SymInt[] pad, float value) -> Tensor");
  m.def(
      "sparse_rearrange_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, int up, int down, int groups, "
      "SymInt[] pad, float value, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()");
  // Block-sparse weights. `layout` is block rows, block columns, blocks, in_features, out_features, block_size, and the
  // words of three plans; `shape` its first six numbers. Matrices are [rows, features].
  m.def("block_layout_tables(Tensor coords, SymInt[] shape) -> Tensor");
  m.def("blocksparse_plan(Tensor tables, SymInt[] shape, int purpose) -> Tensor");
  m.def(
      "blocksparse_matmul(Tensor x, Tensor weight, Tensor? gate, Tensor? bias, Tensor tables, SymInt[] layout, "
      "bool transposed, str activation, float activation_param, bool allow_tf32) -> Tensor");
  m.def(
      "blocksparse_conv1x1(Tensor x, Tensor weight, Tensor? gate, Tensor? bias, Tensor tables, SymInt[] layout, "
      "Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, str activation, float activation_param, "
      "bool allow_tf32) -> Tensor");
  m.def("blocksparse_weight_grad(Tensor[] x, Tensor[] dy, Tensor tables, SymInt[] layout, bool allow_tf32) -> Tensor");
  // `layout` of convolutions is BlocksparseConvShape's numbers, `geometry` kernel_size, stride, padding, dilation of
  // three axes each, `output_size` three numbers. x is [N, C, D, H, W]; the filters of all blocks lie in one vector.
  m.def("blocksparse_conv_tables(Tensor lists, int inputs, int outputs, int taps) -> Tensor");
  m.def(
      "blocksparse_conv(Tensor x, Tensor weight, Tensor? bias, Tensor conv_tables, SymInt[] conv_layout, SymInt[] "
      "geometry, "
      "SymInt[] output_size, bool transposed, str activation, float activation_param) -> Tensor");
  m.def(
      "blocksparse_conv_active(Tensor x, Tensor weight, Tensor? bias, Tensor conv_tables, SymInt[] conv_layout, "
      "SymInt[] geometry, SymInt[] output_size, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, "
      "str activation, float activation_param) -> Tensor");
  m.def(
      "blocksparse_conv_weight_grad(Tensor x, Tensor dy, Tensor conv_tables, SymInt[] conv_layout, SymInt[] geometry) "
      "-> Tensor");
  // Block-sparse attention. `rule` is diagonal, band, prefix, stride, phases, block_size; rows, columns, mask_index
  // and masks are AttentionLayout's of core/attention/layout.h.
  m.def("pack_attention_blocks(Tensor blocks) -> (Tensor rows, Tensor columns)");
  m.def(
      "block_attention(Tensor q, Tensor k, Tensor v, Tensor? rows, Tensor? columns, Tensor? mask_index, Tensor? masks, "
      "Tensor? q_lengths, Tensor? k_lengths, Tensor? seed, SymInt[] rule, float scale, float dropout, "
      "bool deterministic) -> (Tensor out, Tensor lse, Tensor sums)");
  m.def(
      "block_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor sums, Tensor q, "
      "Tensor k, Tensor v, Tensor? rows, Tensor? columns, Tensor? mask_index, Tensor? masks, Tensor? q_lengths, "
      "Tensor? k_lengths, Tensor? seed, SymInt[] rule, float scale, float dropout, bool deterministic) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
}

namespace sbnet::binding {

// The stable ABI has no stream getter that 2.10 knows: libtorch_cuda's C shim has one, absent in CPU-only torch.
void* Call::stream() const {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = []() -> Getter {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  SBNET_TORCH_CHECK(getter, "sbnet::", op_, ": this torch has no CUDA");
  void* stream = nullptr;
  // Compared by hand: torch's macros for it have changed their names between releases.
  SBNET_TORCH_CHECK(getter(device_, &stream) == 0, "sbnet::", op_, ": torch has no current stream of device ", device_);
  return stream;
}

Parallel Call::parallel() const {
  const auto run = [](void*, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* arg) {
    torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(arg, begin, end); });
  };
  return Parallel{run, nullptr, static_cast<int32_t>(torch::stable::get_num_threads())};
}

}  // namespace sbnet::binding
