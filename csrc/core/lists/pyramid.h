// The active blocks and the fringes of every plane of a network from one pixel mask: the pyramid of the `masked`
// contract. A block of an H x W plane is active iff the mask, grown by a margin and max-pooled adaptively to H x W, is
// set in one of its pixels: iff a pixel above tol lies in one rectangle of the mask (pyramid_span).
#pragma once
#include <vector>

#include "core/lists/fringe.h"

namespace sbnet {

struct PyramidPlane {
  TiledPlane tiles;
  int32_t* indices;    // [N*blocks, 3] out: (n, i, j) in raster order, then -1
  int32_t* count;      // [1] out
  int32_t* total;      // [1] out: the count again, since nothing is cut
  int32_t* block_map;  // [N, tiles.count[0], tiles.count[1]] out: slot or -1
};

struct PyramidConsumer {
  int32_t plane;  // of its output
  Window window;
};

// The fringe of a tensor on `plane` for all of its consumers together.
struct PyramidFringe {
  int32_t plane, first_consumer, consumers;
  int32_t* pixels;  // [N*H*W] out: linear indices, ascending, then -1
  int32_t* count;   // [1] out
};

struct PyramidParams {
  const void* mask;  // [N, H, W], any strides
  DType mask_dtype;  // bool, uint8, float16, bfloat16, float32, float64
  int64_t size[3], stride[3];
  double tol;      // a pixel is set iff it is greater; compared in float32 (float64 masks: in float64)
  int64_t margin;  // rows and columns by which the mask is grown on each side
  bool kept;       // CPU: fringes are as a call of these params left them
  int32_t planes, fringes;
  PyramidPlane* plane;        // [planes]; these arrays are the host's
  PyramidFringe* fringe;      // [fringes]
  PyramidConsumer* consumer;  // of all fringes, one after the other

  int64_t blocks(int k) const { return size_product({size[0], plane[k].tiles.count[0], plane[k].tiles.count[1]}); }
  int64_t pixels(int k) const { return size_product({size[0], plane[k].tiles.size[0], plane[k].tiles.size[1]}); }
};

// The numbers that bindings take. `planes`: height, width, block height, block width of each. `fringes`: of each, its
// plane and how many consumers follow, eleven numbers each: plane, then a window's.
struct PyramidNumbers {
  const int64_t* planes;
  int64_t plane_numbers;
  const int64_t* fringes;
  int64_t fringe_numbers;
};
// Are there as many numbers as planes, fringes and consumers need? Then says how many of those.
SBNET_EXPORT Status count_pyramid(const PyramidNumbers& n, int64_t* planes, int64_t* fringes, int64_t* consumers);
// Fills p's arrays, which have room for as many.
SBNET_EXPORT Status read_pyramid(const PyramidNumbers& n, PyramidParams* p);
SBNET_EXPORT Status validate(const PyramidParams& p);

// Params with their arrays: bindings keep one over a call.
class PyramidTables {
 public:
  PyramidParams params = {};
  Status read(const PyramidNumbers& n) {
    int64_t planes = 0, fringes = 0, consumers = 0;
    SBNET_TRY(count_pyramid(n, &planes, &fringes, &consumers));
    plane_.resize(static_cast<size_t>(planes));
    fringe_.resize(static_cast<size_t>(fringes));
    consumer_.resize(static_cast<size_t>(consumers));
    params.plane = plane_.data(), params.fringe = fringe_.data(), params.consumer = consumer_.data();
    return read_pyramid(n, &params);
  }

 private:
  std::vector<PyramidPlane> plane_;
  std::vector<PyramidFringe> fringe_;
  std::vector<PyramidConsumer> consumer_;
};

// What blocks i of a plane see of the mask along dimension d: coordinates [begin, end). That a pixel of the grown mask
// is set in a rectangle means that one of the mask is in the rectangle as much larger.
struct Span {
  int begin, end;
};
SBNET_HOST_DEVICE inline Span pyramid_span(const TiledPlane& plane, int d, int i, int mask_side, int margin) {
  const int first = i * plane.side(d), side = plane.size[d];
  const int last = lesser(first + plane.side(d), side);
  Span s;
  if (mask_side <= 0xffff && side <= 0xffff)  // the same in 32 bits
    s = {static_cast<int>(static_cast<uint32_t>(first) * mask_side / side),
         static_cast<int>((static_cast<uint32_t>(last) * mask_side + side - 1) / side)};
  else
    s = {static_cast<int>(static_cast<int64_t>(first) * mask_side / side),
         static_cast<int>((static_cast<int64_t>(last) * mask_side + side - 1) / side)};
  return {s.begin > margin ? s.begin - margin : 0, lesser(s.end + margin, mask_side)};
}

// CUDA: what the tables take in the workspace where they outgrow a launch's parameters; see cuda/lists/pyramid.cu.
constexpr int64_t kPyramidTableEntry = 160;
int64_t pyramid_table_words(const PyramidParams& p);

// Where what is written goes: list({sizes}) gives memory for each output, in the order of the op's outputs.
template <class List>
void set_lists(PyramidParams& p, const List& list) {
  for (int k = 0; k < p.planes; ++k) {
    PyramidPlane& plane = p.plane[k];
    plane.indices = list({p.blocks(k), 3});
    plane.count = list({1});
    plane.total = list({1});
    plane.block_map = list({p.size[0], plane.tiles.count[0], plane.tiles.count[1]});
  }
  for (int k = 0; k < p.fringes; ++k) {
    p.fringe[k].pixels = list({p.pixels(p.fringe[k].plane)});
    p.fringe[k].count = list({1});
  }
}

// Rows of the mask that no block's rectangle separates: kernels reduce strips of so many rows first. At most 64.
int pyramid_strip(const PyramidParams& p);

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(mask_pyramid, PyramidParams)
