#include "core/lists/fringe.h"

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct Fringe {
  static constexpr const char* kName = "fringe";
  // dynamic_size, (height, width) where the attribute size is not given, stays on the CPU: shapes are host data.
  static constexpr Argument kInputs[] = {
      {"producer_map", kInt32}, {"consumer_map", kInt32}, {"dynamic_size", kInt64, kOptional, kCpuInput}};
  static constexpr Argument kOutputs[] = {{"pixels", kInt32}, {"count", kInt32}};
  static constexpr Types kTypes[] = {{kInt32, kInt32}};
  static constexpr int kInPlace = -1;

  GridAttributes producer, consumer;
  Pair kernel, stride, padding, dilation;
  std::optional<Pair> size;
  int64_t capacity;  // -1: all pixels

  explicit Fringe(const Attributes& a)
      : producer(a, "producer_"),
        consumer(a, "consumer_"),
        kernel(a.required_pair("kernel_size")),
        stride(a.pair("stride", 1)),
        padding(a.pair("padding", 0)),
        dilation(a.pair("dilation", 1)),
        size(a.pair(std::string("size"))),
        capacity(a.integer("capacity", -1)) {
    if (capacity < -1) raise("sbnet::", kName, ": capacity: ", capacity, "; 0 or more (or -1, all pixels) is wanted");
  }

  void infer(ShapeContext& s) const {
    const Dims map = s.input(0, 3);
    s.input(1, 3);
    Dim pixels;
    if (capacity >= 0)
      pixels = capacity;
    else if (size && !map.empty() && map[0].known())
      pixels = map[0].value * (*size)[0] * (*size)[1];
    s.output(0, {pixels});
    s.output(1, {1});
  }

  void compute(Context& c) const {
    const Tensor producer_map = c.input(0, 3), consumer_map = c.input(1, 3), given = c.input(2);
    FringeParams p = {};
    p.batch = producer_map.shape[0];
    if (given.present) {
      if (given.shape != std::vector<int64_t>{2})
        raise("sbnet::", kName, ": size: ", given.elements(), " numbers; 2 (height, width) are wanted");
      p.height = static_cast<const int64_t*>(given.data)[0], p.width = static_cast<const int64_t*>(given.data)[1];
    } else if (size) {
      p.height = (*size)[0], p.width = (*size)[1];
    } else {
      raise("sbnet::", kName, ": size: missing; (height, width) as attribute, or dynamic_size, is wanted");
    }
    const int64_t plane[2] = {p.height, p.width};
    int64_t out[2];
    for (int d = 0; d < 2; ++d) {
      const size_t e = static_cast<size_t>(d);
      p.window.kernel[d] = kernel[e], p.window.stride[d] = stride[e], p.window.padding[d] = padding[e],
      p.window.dilation[d] = dilation[e];
      if (plane[d] < 1 || plane[d] > INT32_MAX || kernel[e] < 1 || stride[e] < 1)
        raise("sbnet::", kName, ": size, kernel_size, stride: ", plane[d], ", ", kernel[e], ", ", stride[e],
              "; at least 1 is wanted");
      out[d] = (plane[d] + 2 * int64_t{padding[e]} - int64_t{dilation[e]} * (kernel[e] - 1) - 1) / stride[e] + 1;
    }
    p.out_height = out[0], p.out_width = out[1];
    const auto map_only = [&](const Tensor& map, const GridAttributes& grid, int64_t height, int64_t width) {
      static const int32_t unused = 0;  // only the maps are read
      ActiveView a = {};
      a.grid = grid.over(height, width);
      a.block_map = c.int32(map, {p.batch, a.grid.count[0], a.grid.count[1]});
      a.count = &unused;
      return a;
    };
    p.producer = map_only(producer_map, producer, p.height, p.width);
    p.consumer = map_only(consumer_map, consumer, p.out_height, p.out_width);
    check(validate(p));
    p.capacity = capacity >= 0 ? capacity : p.batch * p.height * p.width;
    check(validate(p));
    p.pixels = static_cast<int32_t*>(c.output(0, {p.capacity}));
    p.count = static_cast<int32_t*>(c.output(1, {1}));
    const Workspace scratch(c, sbnet_fringe_workspace_bytes(&p));
    const Parallel parallel = c.parallel();
    check(SBNET_ORT_ON_DEVICE(c, sbnet_fringe_cpu(&p, scratch.data(), &parallel),
                              sbnet_fringe_cuda(&p, scratch.data(), c.stream())));
  }
};

}  // namespace

void add_fringe_ops(const Runtime& runtime) { add_op<Fringe>(runtime); }

}  // namespace sbnet::ort
