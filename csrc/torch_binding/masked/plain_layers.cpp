// The ops of core/masked/plain_layers.h, functional and in place, by what they say of themselves.
#include "core/masked/plain_layers.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// Their numbers as a schema names them.
struct SchemaNumbers {
  std::string text;

  void add(const char* type, const char* name) { text += std::string(", ") + type + " " + name; }
  void integer(const char* name, int32_t*, int32_t) { add("int", name); }
  void optional_integer(const char* name, int32_t*) { add("int?", name); }
  void real(const char* name, float*, float) { add("float", name); }
  void flag(const char* name, bool*, bool) { add("bool", name); }
  template <size_t kCount>
  void required(const char* name, int32_t (&)[kCount]) {
    add("SymInt[]", name);
  }
  template <size_t kCount, class Otherwise>
  void integers(const char* name, int32_t (&to)[kCount], const Otherwise&) {
    required(name, to);
  }
};

// Arguments as torch hands them over. All are taken, which frees them, before an error is raised.
class Arguments {
 public:
  Arguments(const char* op, StableIValue* first) : op_(op), next_(first) {}

  template <class T>
  T next() {
    return torch::stable::detail::to<T>(*next_++);
  }
  void integer(const char* name, int32_t* to, int32_t) { put(name, next<int64_t>(), to); }
  void optional_integer(const char* name, int32_t* to) {
    const auto value = next<std::optional<int64_t>>();
    if (value && !*value) note(SBNET_INVALID("%s: %s: expected anything but 0, got 0", op_, name));
    put(name, value.value_or(0), to);
  }
  void real(const char*, float* to, float) { *to = static_cast<float>(next<double>()); }
  void flag(const char*, bool* to, bool) { *to = next<bool>(); }
  template <size_t kCount>
  void required(const char* name, int32_t (&to)[kCount]) {
    const Ints values = next<Ints>();
    if (values.size() != kCount)
      return note(SBNET_INVALID("%s: %s: expected %zu numbers, got %zu", op_, name, kCount, values.size()));
    for (size_t k = 0; k < kCount; ++k) put(name, values[k], &to[k]);
  }
  template <size_t kCount, class Otherwise>
  void integers(const char* name, int32_t (&to)[kCount], const Otherwise&) {
    required(name, to);
  }
  const Status& status() const { return status_; }

 private:
  void note(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  void put(const char* name, int64_t value, int32_t* to) {
    if (value < INT32_MIN || value > INT32_MAX)
      note(SBNET_INVALID("%s: %s: expected numbers of 32 bits, got %lld", op_, name, static_cast<long long>(value)));
    *to = static_cast<int32_t>(value);
  }

  const char* op_;
  StableIValue* next_;
  Status status_ = ok_status();
};

template <class L>
void run(const LayerCall& layer, typename L::Params p) {
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  const auto kernel = [=](void*, const Parallel& parallel) { return L::cpu(&p, &parallel); };
  check(layer.op, SBNET_ON_DEVICE(call, run_on_cpu(layer.op, nullptr, kernel, layer), L::cuda(&p, call.stream())));
}

template <class L>
void functional(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(L::kName, stack);
  const Tensor x = in.next<Tensor>(), indices = in.next<Tensor>(), count = in.next<Tensor>(),
               block_map = in.next<Tensor>();
  const Ints grid = in.next<Ints>();
  typename L::Params p = {};
  L::numbers(p, in);
  check(in.status());
  check_rank(L::kName, "x", x, 4);
  check(L::check(p));
  int64_t size[4];
  for (int d = 1; d < 4; ++d) check(L::size(p, d, x.size(d), &size[d]));
  const Tensor y = zeros_for(L::kName, x, size[1], {size[2], size[3]}, block_map, grid);
  run<L>({L::kName, x, indices, count, grid, y}, p);
  stack[0] = torch::stable::detail::from(y);
}

template <class L>
void in_place(StableIValue* stack, uint64_t, uint64_t) {
  static const std::string op = std::string(L::kName) + "_";
  Arguments in(op.c_str(), stack);
  const Tensor x = in.next<Tensor>(), indices = in.next<Tensor>(), count = in.next<Tensor>();
  const Ints grid = in.next<Ints>();
  typename L::Params p = {};
  L::numbers(p, in);
  const Tensor out = in.next<Tensor>();
  const auto pixels = in.next<std::optional<Tensor>>(), pixel_count = in.next<std::optional<Tensor>>();
  check(in.status());
  run<L>({op.c_str(), x, indices, count, grid, out, pixels, pixel_count}, p);
}

template <class L>
void add(OpList& ops) {
  typename L::Params p = {};
  SchemaNumbers numbers;
  L::numbers(p, numbers);
  const std::string name = L::kName, lists = "(Tensor x, Tensor indices, Tensor count, ";
  ops.add((name + lists + "Tensor block_map, SymInt[] grid" + numbers.text + ") -> Tensor").c_str(), &functional<L>);
  ops.add((name + "_" + lists + "SymInt[] grid" + numbers.text +
           ", Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()")
              .c_str(),
          &in_place<L>);
}

template <class... L>
void add_all(OpList& ops, LayerList<L...>) {
  (add<L>(ops), ...);
}

void list_ops(OpList& ops) { add_all(ops, PlainLayers()); }

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_OPS(sbnet::binding::list_ops)
