// 3x3 convolutions of stride 1 by patches, with what every GPU since sm_80 has: mma.sync, ldmatrix, cp.async.
//
// A unit is some rows of a cell of 16x16 pixels, or pairs of cells of 8x8, by 64 or 128 output channels. The patch of x
// that it sees, its halo with it, comes to shared memory once for 32 input channels (16 of float32), and all nine taps
// read it there: 64 bytes a pixel, whose word w lies at w ^ (column / 2 % 4), so that any eight neighbours are free of
// bank conflicts. The taps go by columns of the kernel. A fragment is one row of the patch and serves the three taps of
// a column: a warp of 64 pixels loads six for its twelve products of rows. A piece of the weights is one column for as
// many input channels.
//
// Output channels are permuted among the columns of products (conv_sums.cuh), so that a lane holds eight neighbouring
// channels: results go straight from registers while the next unit comes in. What is copied is one stream of pieces
// over all units of a CTA. Between products there is no branch and no division: each costs issue slots that the
// products want.
#pragma once
#include "cuda/masked/conv_patch_shape.cuh"
#include "cuda/masked/conv_sums_bytes.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {

// kTail: the input channels are no multiple of a chunk's.
template <class T, class G, bool kTail>
struct PatchUnits {
  static constexpr int kChunk = 4 * kLanes<T>;  // channels that come at once: 64 bytes
  const ParamsOf<T>& p;
  const PatchPlan& plan;
  const int first_cell, cells, C, K, column_tiles, units, chunks;
  char* const smem;
  const uint32_t stages_a, stages_b;
  // Two, each of a unit's patch: where a pixel is in x, in units of eight channels, or one of these; its swizzled place
  // in the stage.
  static constexpr int kOutside = -1, kSpare = -2;
  int2* const tables;
  // What is copied next.
  int unit_a, chunk_a = 0, third = 0, next_n = 0, next_row = 0, next_column = 0;
  const int2* table;          // this thread's first pixel of the third
  int2 entries[G::kCopiesA];  // of the table, for the piece that is copied
  uint32_t to_a;
  const T* from_a;
  int unit_b, chunk_b = 0, column_b = 0;
  bool in_b;               // false past the last input channel
  uint32_t to_b, place_b;  // the stage, and this thread's place in it
  const T* from_b[G::kRowsB];

  __device__ __forceinline__ PatchUnits(const ParamsOf<T>& p, const PatchPlan& plan, char* smem, int first_cell,
                                        int cells)
      : p(p),
        plan(plan),
        first_cell(first_cell),
        cells(cells),
        C(static_cast<int>(p.x.size[1])),
        K(static_cast<int>(p.weight.size[0])),
        column_tiles(G::channel_tiles(K)),
        units(static_cast<int>(G::units(cells, K))),
        chunks((C + kChunk - 1) / kChunk),
        smem(smem),
        stages_a(shared_address(smem)),
        stages_b(stages_a + G::kStagesA * G::kStageA),
        tables(reinterpret_cast<int2*>(smem + G::kTableAt)),
        unit_a(blockIdx.x),
        unit_b(blockIdx.x) {
    const int n = threadIdx.x / 4;
    to_a = stages_a, to_b = stages_b, table = tables + n;
    from_a = static_cast<const T*>(p.x.data) + own_channel();
    place_b = n * 64 + ((threadIdx.x % 4 ^ (n >> 3 & 3)) << 4);
    begin_b();
  }
  // The first of a chunk's channels that this thread copies.
  static __device__ __forceinline__ int own_channel() { return static_cast<int>(threadIdx.x % 4) * kLanes<T>; }
  __device__ __forceinline__ void bound_b() { in_b = chunk_b * kChunk + own_channel() < C; }
  __device__ __forceinline__ void begin_b() {
    const int first = unit_b % column_tiles * G::kOutputs, left = K - first;
#pragma unroll
    for (int i = 0; i < G::kRowsB; ++i) {
      // Past the last output channel others come again, not one and the same: all would wait for its line.
      int row = threadIdx.x / 4 + i * (G::kThreads / 4);
      if (row >= left) row = row - left < left ? row - left : row % 8;
      from_b[i] = static_cast<const T*>(p.weight.data) + int64_t{first + row} * 9 * C + own_channel();
    }
    bound_b();
  }
  // The first pixel of a cell; n < 0: no block of the list has it.
  __device__ __forceinline__ void locate_cell(int cell, int& n, int& row, int& column) const {
    uint32_t slot, rest, down, across;
    plan.cells_per_block.divmod(static_cast<uint32_t>(cell), &slot, &rest);
    plan.cells_per_row.divmod(rest, &down, &across);
    BlockIndex b;
    const bool is = load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), p.active.grid, &b);
    n = is ? b.n : -1;
    row = b.i * p.active.grid.size[0] + static_cast<int>(down) * G::kCell;
    column = b.j * p.active.grid.size[1] + static_cast<int>(across) * G::kCell;
  }
  __device__ __forceinline__ void locate_unit(int unit, int& n, int& row, int& column) const {  // of 16x16 cells
    const int part = unit / column_tiles;
    locate_cell(first_cell + part / G::kParts, n, row, column);
    row += part % G::kParts * G::kRows;
  }
  // The table of a unit; for 16x16 cells, of next_*, which then are those of the unit after it.
  __device__ __forceinline__ void tabulate(int unit, int2* to) {
    if (unit >= units) return;
    const int first = unit / column_tiles * G::kPatches;
#pragma unroll 1
    for (int i = threadIdx.x; i < G::kTable; i += G::kThreads) {
      if (i >= G::kPixels) {
        to[i] = make_int2(kSpare, static_cast<int>(stages_a) + G::kSpareAt + i % (G::kThreads / 4) * 64);
        continue;
      }
      int pixel = i, n = next_n, row = next_row, column = next_column;
      bool in = true;
      if constexpr (G::kCell == 8) {
        const int patch = pixel / G::kPatchPixels;
        pixel -= patch * G::kPatchPixels;
        in = first + patch < cells;
        locate_cell(first_cell + min(first + patch, cells - 1), n, row, column);
      }
      const int down = pixel / G::kPitch, across = pixel - down * G::kPitch;
      row += down - 1, column += across - 1;
      in &= (n >= 0) & (static_cast<unsigned>(row) < static_cast<unsigned>(p.x.size[2])) &
            (static_cast<unsigned>(column) < static_cast<unsigned>(p.x.size[3]));
      to[i] = make_int2(in ? n * plan.image + row * plan.row + column * plan.column : kOutside,
                        i * 64 + ((across >> 1 & 3) << 4));
    }
    const int after = unit + static_cast<int>(gridDim.x);
    if (G::kCell == 16 && after < units) locate_unit(after, next_n, next_row, next_column);
  }
  __device__ __forceinline__ void read_entries() {
#pragma unroll
    for (int i = 0; i < G::kCopiesA; ++i) entries[i] = table[i * (G::kThreads / 4)];
  }
  // Past the last unit copies repeat, into free stages, and past the patch they are zeros beside the stages: both cost
  // less than a condition.
  __device__ __forceinline__ void copy_a(int i) const {
    const bool in = (entries[i].x >= 0) & (!kTail || chunk_a * kChunk + own_channel() < C);
    const uint32_t stage = entries[i].x == kSpare ? 0 : to_a;
    cp_async_16_or_zeros(stage + (entries[i].y ^ threadIdx.x % 4 << 4), from_a + int64_t{entries[i].x} * 8, in);
  }
  __device__ __forceinline__ void copy_b(int i) const {
    const int j = i % G::kRowsB, r = i / G::kRowsB;
    const uint32_t to = to_b + place_b + (r * G::kOutputs + j * (G::kThreads / 4)) * 64;
    if constexpr (kTail)
      cp_async_16_or_zeros(to, from_b[j] + r * 3 * C, in_b);
    else
      cp_async_16_whole(to, from_b[j] + r * 3 * C);
  }
  __device__ __forceinline__ void advance_a() {
    table += G::kThird;
    if (++third < 3) return;
    third = 0;
    table -= 3 * G::kThird;
    to_a = to_a + G::kStageA == stages_b ? stages_a : to_a + G::kStageA;
    from_a += kChunk;
    if (++chunk_a < chunks) return;
    chunk_a = 0, unit_a += gridDim.x, from_a -= chunks * kChunk;
    if (unit_a < units) table = table < tables + G::kTable ? table + G::kTable : table - G::kTable;
  }
  __device__ __forceinline__ void advance_b() {
    to_b = to_b + G::kStageB == stages_b + G::kStagesB * G::kStageB ? stages_b : to_b + G::kStageB;
#pragma unroll
    for (int i = 0; i < G::kRowsB; ++i) from_b[i] += C;
    if (++column_b < 3) return;
    column_b = 0;
    if (++chunk_b == chunks) {
      chunk_b = 0, unit_b += gridDim.x;
      begin_b();
    } else {
#pragma unroll
      for (int i = 0; i < G::kRowsB; ++i) from_b[i] += kChunk - 3 * C;
      if (chunk_b == chunks - 1) bound_b();  // fewer channels, perhaps
    }
  }
  // The copies of a piece that belong to one of kPlaces places between products.
  template <int kPlaces>
  __device__ __forceinline__ void issue(int place) {
    constexpr int kAll = (G::kKeeps ? 0 : G::kCopiesB) + G::kCopiesA;
#pragma unroll
    for (int i = 0; i < kAll; ++i)
      if (i * kPlaces / kAll == place) {
        const int a = i * G::kCopiesA / kAll, after = (i + 1) * G::kCopiesA / kAll;  // copies of x before this, after
        if (after > a)
          copy_a(a);
        else
          copy_b(i - a);
      }
  }
  __device__ __forceinline__ void end_piece() {
    cp_async_commit();
    // One piece into a unit: all threads have passed a barrier since the last copy that used the other table.
    if (chunk_a == 0 && third == 1)
      tabulate(unit_a + static_cast<int>(gridDim.x), table < tables + G::kTable ? tables + G::kTable : tables);
    advance_a();
    if constexpr (!G::kKeeps) advance_b();
    read_entries();
  }

  // The first pixels of the lane's two columns, as far as they are known from each other; n < 0: there is no such
  // block.
  static constexpr int kApart = G::kCell == 16 ? 1 : 2;
  struct Place {
    int n[kApart], row[kApart], column[kApart];
  };
  __device__ __forceinline__ Place place(int unit, int warp_row, int lane) const {
    Place place;
    if constexpr (G::kCell == 16) {
      locate_unit(unit, place.n[0], place.row[0], place.column[0]);
      place.row[0] += warp_row * G::kWarpRows, place.column[0] += lane / 4;
    } else {
#pragma unroll
      for (int h = 0; h < kApart; ++h) {
        const int cell = unit / column_tiles * G::kPatches + warp_row * G::kWarpRows / 8 * 2 + h;
        locate_cell(first_cell + min(cell, cells - 1), place.n[h], place.row[h], place.column[h]);
        place.row[h] += warp_row * G::kWarpRows % 8, place.column[h] += lane / 4;
        if (cell >= cells) place.n[h] = -1;
      }
    }
    return place;
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void finish(SumOf<T> (&sums)[G::kWarpRows][G::kTiles][4], const Place& at, int unit,
                                         int warp_column, int lane) const {
    Output first[2];
    int rows[2];  // from there on the plane
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = h % kApart, column = at.column[i] + (kApart == 1 ? 8 * h : 0);
      first[h] = output_of(p, {at.n[i], at.row[i], column});
      rows[h] = (at.n[i] < 0) | (column >= p.y.size[3]) ? 0 : static_cast<int>(p.y.size[2]) - at.row[i];
    }
    const auto to = [&](int m, int h) -> Output {
      const int row = kFirst + m;
      if (row >= rows[h]) return {-1, 0};
      return {first[h].y + row * p.y.stride[2], first[h].residual + row * p.residual.stride[2]};
    };
    const int k0 = unit % column_tiles * G::kOutputs + warp_column * G::kWarpOutputs + lane % 4 * 8;
    finish_sums<T>(p, reinterpret_cast<SumOf<T>(&)[kEnd - kFirst][G::kTiles][4]>(sums[kFirst]), to, k0, K);
  }

  __device__ __forceinline__ void run() {
    if (unit_a >= units) return;
    constexpr int kRows = G::kWarpRows, kPairs = G::kWarpOutputs / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int half = G::kSplit == 2 ? warp / (G::kDown * G::kAcross) : 0,
              warp_row = warp % (G::kDown * G::kAcross) / G::kAcross, warp_column = warp % G::kAcross;
    const int l16 = lane % 16, high = lane / 16;
    const int across = G::kCell == 16 ? l16 : l16 % 8;
    const int pixel = G::kCell == 16 ? warp_row * kRows * G::kPitch + l16
                                     : (warp_row * kRows / 8 * 2 + l16 / 8) * G::kPatchPixels +
                                           warp_row * kRows % 8 * G::kPitch + l16 % 8;
    const int l8 = lane % 8;
    const uint32_t lane_b = (warp_column * G::kWarpOutputs + 8 * (l8 / 2) + l8 % 2 + lane / 16 * 2) * 64 +
                            (((((lane / 8) % 2) ^ (l8 / 2)) << 4) ^ (half * 32));
    const auto address_a = [&](uint32_t stage, int s) {  // of a column of taps
      return stage + (pixel + s) * 64 + (((high ^ ((across + s) >> 1 & 3)) << 4) ^ (half * 32));
    };
    if constexpr (G::kCell == 16) locate_unit(unit_a, next_n, next_row, next_column);
    tabulate(unit_a, tables);
    tabulate(unit_a + static_cast<int>(gridDim.x), tables + G::kTable);
    __syncthreads();
    read_entries();

    constexpr int kSteps = G::kSplit == 2 ? 3 : 6;  // of a piece: a tap and 16 channels each
    constexpr int kPlaces = (kSteps - 1) * kRows;   // of copies: from the last step on, without the one before it
    constexpr int kHeld = G::kSplit == 2 ? 3 : 2;   // fragments of weights
#pragma unroll 1
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < G::kCopiesA; ++i) copy_a(i);
      advance_a();
      read_entries();
    }
    if constexpr (G::kKeeps) {  // the three columns of the only chunk: a stage each
#pragma unroll 1
      for (int column = 0; column < 3; ++column) {
#pragma unroll
        for (int i = 0; i < G::kCopiesB; ++i) copy_b(i);
        to_b += G::kStageB, from_b[0] += C;
      }
    }
#pragma unroll 1
    for (int g = 0; g < G::kAhead; ++g) {
      issue<1>(0);
      __syncthreads();  // end_piece() may write the table that was just read
      end_piece();
    }
    cp_async_wait<G::kAhead - 1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) issue<kPlaces>(i);

    uint32_t a[kRows + 2][4], b[kHeld][kPairs][4];
    uint32_t stage_a = stages_a, stage_b = stages_b, at_a = address_a(stages_a, 0), at_b = stages_b + lane_b;
    int s = 0;
    const auto load_a = [&](uint32_t from, int kk, int row) {
      load_matrix_x4((from ^ (kk * 32)) + row * G::kPitch * 64, a[row]);
    };
    const auto load_b = [&](uint32_t from, int kk, int r, int j, uint32_t (&to)[kPairs][4]) {
      load_matrix_x4((from ^ (kk * 32)) + r * G::kOutputs * 64 + j / 2 * 2048 + j % 2 * 256, to[j]);
    };
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_a(at_a, 0, i);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) load_b(at_b, 0, 0, j, b[0]);

    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      SumOf<T> sums[kRows][G::kTiles][4];
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int j = 0; j < G::kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][j][e] = 0;
#pragma unroll 1
      for (int piece = 0; piece < chunks * 3; ++piece) {
        uint32_t next_a = 0, next_b = 0;  // where the next piece is
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int kk = step / 3, r = step % 3, next_kk = (step + 1) % kSteps / 3, next_r = (step + 1) % 3;
          const bool last = step == kSteps - 1;
          if (step == kSteps - 2) {
            if (++s == 3) {
              s = 0;
              stage_a = stage_a + G::kStageA == stages_b ? stages_a : stage_a + G::kStageA;
            }
            stage_b = stage_b + G::kStageB == stages_b + G::kStagesB * G::kStageB ? stages_b : stage_b + G::kStageB;
            next_a = address_a(stage_a, s), next_b = stage_b + lane_b;
          }
          if (last) {
            cp_async_wait<G::kAhead - 1>();
            __syncthreads();
            at_a = next_a, at_b = next_b;
          }
#pragma unroll
          for (int j = 0; j < kPairs; ++j) load_b(at_b, next_kk, next_r, j, b[(step + 1) % kSteps % kHeld]);
          if (r < 2) {
            load_a(at_a, kk, kRows + r);
          } else {
            load_a(at_a, next_kk, 0);
            load_a(at_a, next_kk, 1);
          }
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
#pragma unroll
            for (int j = 0; j < G::kTiles; ++j) {
              const uint32_t* weights = b[step % kHeld][j / 2];
              if constexpr (sizeof(T) == 4) {  // a fragment's first use
                if (j == 0 && (r == 0 || m == kRows - 1)) round_fragment(a[m + r]);
                if (m == 0 && j % 2 == 0) round_fragment(b[step % kHeld][j / 2]);
              }
              mma_16x8<T>(sums[m][j], a[m + r], weights[j % 2 * 2], weights[j % 2 * 2 + 1]);
            }
            if (r == 2 && m + 2 < kRows) load_a(at_a, next_kk, m + 2);  // its last use was just now
            if (step != kSteps - 2) issue<kPlaces>((last ? 0 : step + 1) * kRows + m);
          }
          if (step == kSteps - 3) end_piece();
        }
      }
      const Place at = place(unit, warp_row, lane);  // not before: it would hold registers
      if constexpr (G::kSplit == 2) {
        constexpr int kHalf = kRows / 2;
        share_sums<G>(smem, sums, half);
        if (half == 0)
          finish<0, kHalf>(sums, at, unit, warp_column, lane);
        else
          finish<kHalf, kRows>(sums, at, unit, warp_column, lane);
      } else {
        finish<0, kRows>(sums, at, unit, warp_column, lane);
      }
    }
    cp_async_commit();  // of what was copied since the last piece: other units may come here
    cp_async_wait<0>();
    __syncthreads();
  }
};

}  // namespace sbnet::portable
