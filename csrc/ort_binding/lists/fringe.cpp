#include "core/lists/fringe.h"

#include <algorithm>

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct Fringe {
  static constexpr const char* kName = "fringe";
  // size: of the tensor and of the consumer's output. dynamic_size, where the attribute is not given, stays on the CPU:
  // shapes are host data.
  static constexpr Argument kInputs[] = {
      {"producer_map", kInt32}, {"consumer_map", kInt32}, {"dynamic_size", kInt64, kOptional, kCpuInput}};
  static constexpr Argument kOutputs[] = {{"pixels", kInt32}, {"count", kInt32}};
  static constexpr Types kTypes[] = {{kInt32, kInt32}};
  static constexpr int kInPlace = -1;

  GridAttributes producer, consumer;
  Window window;
  std::vector<int64_t> size;
  int64_t capacity;  // -1: all pixels

  explicit Fringe(const Attributes& a)
      : producer(a, "producer_"),
        consumer(a, "consumer_"),
        window(window_of(a)),
        size(a.integers("size")),
        capacity(a.integer("capacity", -1)) {
    if (capacity < -1) raise_expected(kName, "capacity", "0 or more (or -1, all pixels), got ", capacity);
    if (!size.empty()) check_size(size);
  }
  static Window window_of(const Attributes& a) {
    const std::vector<int64_t> given = a.required_integers("window");
    if (given.size() != kWindowNumbers)
      raise_expected(kName, "window", kWindowNumbers, " numbers (num, den, lo, hi, step), got ", given.size());
    int64_t numbers[kWindowNumbers];
    std::copy(given.begin(), given.end(), numbers);
    Window w = {};
    check(read_window(kName, numbers, &w));
    return w;
  }
  static void check_size(const std::vector<int64_t>& at) {
    if (at.size() != 4)
      raise_expected(kName, "size", "height and width of the tensor and of what the consumer writes, got ", at.size(),
                     " numbers");
    for (const int64_t side : at)
      if (side < 1 || side > (1 << 29)) raise_expected(kName, "size", "1 to 2^29, got ", side);
  }

  void infer(ShapeContext& s) const {
    const Dims map = s.input(0, 3);
    s.input(1, 3);
    Dim pixels;
    if (capacity >= 0)
      pixels = capacity;
    else if (!size.empty() && !map.empty() && map[0].known())
      pixels = size_product({map[0].value, size[0], size[1]});
    s.output(0, {pixels});
    s.output(1, {1});
  }

  void compute(Context& c) const {
    const Tensor producer_map = c.input(0, 3), consumer_map = c.input(1, 3), given = c.input(2);
    FringeParams p = {};
    p.batch = producer_map.shape[0];
    std::vector<int64_t> at = size;
    if (given.present) {
      const int64_t* numbers = static_cast<const int64_t*>(given.data);
      at.assign(numbers, numbers + given.elements());
    }
    if (at.empty()) raise_expected(kName, "size", "an attribute, or dynamic_size, got neither");
    check_size(at);
    p.height = at[0], p.width = at[1], p.out_height = at[2], p.out_width = at[3];
    p.window = window;
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
    run(c, SBNET_KERNELS(fringe), p, sbnet_fringe_workspace_bytes(&p));
  }
};

}  // namespace

SBNET_ORT_OPS(Fringe)

}  // namespace sbnet::ort
