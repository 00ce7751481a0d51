#include "core/lists/pyramid.h"

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct MaskPyramid {
  static constexpr const char* kName = "mask_pyramid";
  // dynamic_sizes, the heights and widths where the attribute sizes is not given, stays on the CPU.
  static constexpr Argument kInputs[] = {{"mask", kT}, {"dynamic_sizes", kInt64, kOptional, kCpuInput}};
  // indices, count, total, block_map of each plane, then pixels, count of each fringe.
  static constexpr Argument kOutputs[] = {{"lists", kInt32, kVariadic}};
  static constexpr auto kTypes = kMaskTypes;
  static constexpr int kInPlace = -1;

  std::vector<int64_t> bsizes, sizes, fringes;
  float tol;
  int64_t margin;

  explicit MaskPyramid(const Attributes& a)
      : bsizes(a.required_integers("bsizes")),
        sizes(a.integers("sizes")),
        fringes(a.integers("fringes")),
        tol(a.real("tol", 0.5f)),
        margin(a.integer("margin", 0)) {
    if (bsizes.empty() || bsizes.size() % 2)
      raise_expected(kName, "bsizes", "a pair for each plane, got ", bsizes.size(), " numbers");
    if (!sizes.empty()) check_sizes(sizes.size());
    PyramidTables tables;
    read(&tables, std::vector<int64_t>(bsizes.size(), 1));
  }

  void check_sizes(size_t numbers) const {
    if (numbers != bsizes.size())
      raise_expected(kName, "sizes", bsizes.size(), " numbers (height and width of each plane), got ", numbers);
  }
  void read(PyramidTables* tables, const std::vector<int64_t>& at) const {
    std::vector<int64_t> planes;
    for (size_t k = 0; k < at.size(); k += 2) planes.insert(planes.end(), {at[k], at[k + 1], bsizes[k], bsizes[k + 1]});
    check(tables->read(
        {planes.data(), static_cast<int64_t>(planes.size()), fringes.data(), static_cast<int64_t>(fringes.size())}));
  }

  void infer(ShapeContext& s) const {
    const Dims mask = s.input(0, 3);
    const Dim batch = mask.empty() ? Dim() : mask[0];
    PyramidTables tables;
    read(&tables, sizes.empty() ? std::vector<int64_t>(bsizes.size(), 1) : sizes);
    PyramidParams& p = tables.params;
    size_t at = 0;
    p.size[0] = batch.value;
    const auto of_batch = [&](int64_t each) { return sizes.empty() || !batch.known() ? Dim() : Dim(each); };
    for (int k = 0; k < p.planes; ++k) {
      const int32_t* blocks = p.plane[k].tiles.count;
      s.output(at++, {of_batch(p.blocks(k)), 3});
      s.output(at++, {1});
      s.output(at++, {1});
      s.output(at++, {batch, sizes.empty() ? Dim() : Dim(blocks[0]), sizes.empty() ? Dim() : Dim(blocks[1])});
    }
    for (int k = 0; k < p.fringes; ++k) {
      s.output(at++, {of_batch(p.pixels(p.fringe[k].plane))});
      s.output(at++, {1});
    }
  }

  void compute(Context& c) const {
    const Tensor mask = c.input(0, 3), given = c.input(1);
    std::vector<int64_t> at = sizes;
    if (given.present) {
      const int64_t* numbers = static_cast<const int64_t*>(given.data);
      at.assign(numbers, numbers + given.elements());
    }
    if (at.empty()) raise_expected(kName, "sizes", "height and width of each plane, or dynamic_sizes, got neither");
    check_sizes(at.size());
    PyramidTables tables;
    read(&tables, at);
    PyramidParams& p = tables.params;
    p.mask = mask.data;
    p.mask_dtype = mask.dtype;
    for (size_t d = 0; d < 3; ++d) p.size[d] = mask.shape[d];
    p.stride[0] = size_product({mask.shape[1], mask.shape[2]}), p.stride[1] = mask.shape[2], p.stride[2] = 1;
    p.tol = tol, p.margin = margin;
    check(validate(p));
    const size_t wanted = static_cast<size_t>(4 * p.planes + 2 * p.fringes);
    if (c.outputs() != wanted)
      raise_expected(kName, "outputs", wanted, " (four a plane and two a fringe), got ", c.outputs());
    size_t index = 0;
    set_lists(p, [&](const std::initializer_list<int64_t>& shape) {
      return static_cast<int32_t*>(c.output(index++, shape));
    });
    run(c, SBNET_KERNELS(mask_pyramid), p, sbnet_mask_pyramid_workspace_bytes(&p));
  }
};

}  // namespace

SBNET_ORT_OPS(MaskPyramid)

}  // namespace sbnet::ort
