// The ops of core/masked/plain_layers.h, functional and in place, by what they say of themselves.
#include "core/masked/plain_layers.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// Their tensors and numbers as a schema names them, of the functional form or the one in place.
struct Schema {
  bool functional;
  std::string words;

  void add(const char* type, const char* name) { words += std::string(", ") + type + " " + name; }
  void vector(const char* name, const void**, DType*) { add("Tensor?", name); }
  void map(const char* name, TensorView*) { add("Tensor?", name); }
  void integer(const char* name, int32_t*, int32_t) { add("int", name); }
  void optional_integer(const char* name, int32_t*) { add("int?", name); }
  void real(const char* name, float*, float) { add("float", name); }
  void flag(const char* name, bool*, bool) { add("bool", name); }
  template <class Parse>
  void text(const char* name, const char*, const Parse&) {
    add("str", std::strcmp(name, "mode") ? name : "method");  // torch's modes take no op's `mode` by its name
  }
  void sides(const char*, int64_t*) {
    if (functional) add("SymInt[]", "output_size");
  }
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
  Arguments(const char* op, StableIValue* first, bool functional) : op_(op), next_(first), functional_(functional) {}

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
  template <class Parse>
  void text(const char*, const char*, const Parse& parse) {
    note(parse(op_, next<std::string>().c_str()));
  }
  void sides(const char* name, int64_t* to) {
    if (!functional_) return;
    int32_t side[2] = {1, 1};
    required(name, side);
    if (side[0] < 1 || side[1] < 1)
      note(SBNET_INVALID("%s: %s: expected at least 1, got %d, %d", op_, name, side[0], side[1]));
    to[0] = side[0], to[1] = side[1];
  }
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
  bool functional_;
  Status status_ = ok_status();
};

using Further = std::vector<std::optional<Tensor>>;

// Their further tensors: taken with the arguments, read when y is known.
struct TakeTensors {
  Arguments& in;
  Further all;
  void vector(const char*, const void**, DType*) { all.push_back(in.next<std::optional<Tensor>>()); }
  void map(const char*, TensorView*) { all.push_back(in.next<std::optional<Tensor>>()); }
};
struct ReadTensors {
  const Call& call;
  const TensorView& y;
  std::optional<Tensor>* next;
  const char* first = nullptr;  // vector that was given
  void vector(const char* name, const void** to, DType* dtype) {
    DType own = first ? *dtype : y.dtype;
    *to = bias_of(call, name, *next, y.size[1], &own);
    SBNET_TORCH_EXPECT(!first || own == *dtype, call.op(), std::string(name) + ": dtype", "that of ", first, ", ",
                       dtype_name(*dtype), ", got ", dtype_name(own));
    if (!first && *next) first = name;
    ++next;
    *dtype = own;
  }
  void map(const char* name, TensorView* to) {
    if (*next) {
      call.same_device(name, **next);
      *to = view4(call.op(), name, **next);
      broadcast(y, to);
    }
    ++next;
  }
};

template <class L>
void run_layer(const LayerCall& layer, Further further, typename L::Params p) {
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  ReadTensors read{call, p.y, further.data()};
  L::tensors(p, read);
  if constexpr (std::is_null_pointer_v<decltype(L::workspace)>) {
    check(layer.op, run(call, L::kernels, p, layer, further));
  } else {
    check(layer.op, validate(p));  // what the workspace's size is of
    const Tensor scratch = workspace(layer.x, L::workspace(&p));
    check(layer.op, run_in(call, L::kernels, p, scratch, layer, further));
  }
}

template <class L>
void functional(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(L::kName, stack, true);
  const Tensor x = in.next<Tensor>();
  typename L::Params p = {};
  TakeTensors further{in, {}};
  L::tensors(p, further);
  const Tensor indices = in.next<Tensor>(), count = in.next<Tensor>(), block_map = in.next<Tensor>();
  const Ints grid = in.next<Ints>();
  L::numbers(p, in);
  check(in.status());
  check_rank(L::kName, "x", x, 4);
  check(L::check(p));
  int64_t size[4];
  for (int d = 1; d < 4; ++d) check(L::size(p, d, x.size(d), &size[d]));
  const Tensor y = zeros_for(L::kName, x, size[1], {size[2], size[3]}, block_map, grid);
  LayerCall call = {L::kName, x, indices, count, grid, y};
  if (L::kReadsMap) call.block_map = block_map;
  run_layer<L>(call, further.all, p);
  stack[0] = torch::stable::detail::from(y);
}

template <class L>
void in_place(StableIValue* stack, uint64_t, uint64_t) {
  static const std::string op = std::string(L::kName) + "_";
  Arguments in(op.c_str(), stack, false);
  const Tensor x = in.next<Tensor>();
  typename L::Params p = {};
  TakeTensors further{in, {}};
  L::tensors(p, further);
  const Tensor indices = in.next<Tensor>(), count = in.next<Tensor>();
  std::optional<Tensor> block_map;
  if (L::kReadsMap) block_map = in.next<Tensor>();
  const Ints grid = in.next<Ints>();
  L::numbers(p, in);
  const Tensor out = in.next<Tensor>();
  const auto pixels = in.next<std::optional<Tensor>>(), pixel_count = in.next<std::optional<Tensor>>();
  check(in.status());
  run_layer<L>({op.c_str(), x, indices, count, grid, out, pixels, pixel_count, block_map}, further.all, p);
}

template <class L>
void add(OpList& ops) {
  typename L::Params p = {};
  for (const bool functional_form : {true, false}) {
    Schema tensors = {functional_form, ""}, numbers = tensors;
    L::tensors(p, tensors);
    L::numbers(p, numbers);
    const std::string map = functional_form || L::kReadsMap ? ", Tensor block_map" : "";
    const std::string both =
        "(Tensor x" + tensors.words + ", Tensor indices, Tensor count" + map + ", SymInt[] grid" + numbers.words;
    if (functional_form)
      ops.add((L::kName + both + ") -> Tensor").c_str(), &functional<L>);
    else
      ops.add(
          (std::string(L::kName) + "_" + both + ", Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()")
              .c_str(),
          &in_place<L>);
  }
}

template <class... L>
void add_all(OpList& ops, LayerList<L...>) {
  (add<L>(ops), ...);
}

SBNET_TORCH_OPS(ops) { add_all(ops, PlainLayers()); }

}  // namespace
}  // namespace sbnet::binding
