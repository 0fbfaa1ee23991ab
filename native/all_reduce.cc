// All-reduce: every element has one owner, who folds it in rank order and hands it to all.
#include <algorithm>

#include "collectives.h"
#include "kernels.h"

namespace syncline {

namespace {

// What the loops below need to know, worked out once.
struct Reduction {
  Engine& engine;
  const Call& call;
  Mesh& mesh = engine.mesh;
  int rank = mesh.rank();
  int world = mesh.world();
  size_t element = size_of(call.dtype);
  std::byte* data = static_cast<std::byte*>(call.output);

  uint64_t bytes() const { return call.count * element; }
  bool fold_into(std::byte* out, const void* const* inputs, uint64_t count) const {
    return fold(out, inputs, world, count, call.dtype, call.op);
  }
};

// Everybody folds everything. Costs world * bytes of reading, but only one wait.
void fold_slots(const Reduction& it) {
  const void* inputs[max_world];
  for (int rank = 0; rank < it.world; ++rank)
    inputs[rank] = it.mesh.base(rank) + it.mesh.layout().slot(it.engine.agreement.sequence());
  inputs[it.rank] = it.data;
  it.engine.finite = finiteness(it.fold_into(it.data, inputs, it.call.count));
}

void copy_to_slot(const Reduction& it) {
  it.mesh.enter(Phase::copy_in);
  copy_bytes(it.mesh.base(it.rank) + it.mesh.layout().slot(it.engine.agreement.sequence()), it.data, it.bytes());
}

void fold_in_place(const Reduction& it) {
  std::byte* buffers[max_world];
  for (int rank = 0; rank < it.world; ++rank) buffers[rank] = it.mesh.base(rank) + it.engine.agreement.offset(rank);
  it.engine.tell_finite(fold_slice(it.engine, it.call, buffers));
  it.engine.finish_together();
  it.engine.hear_finite();
}

// A piece is cut into one slice per rank. What belongs to another owner goes into the staged piece; the
// own slice is folded straight from private memory, and handed back in the result buffer.
struct StagedPiece {
  const Reduction& it;
  uint64_t number;
  Range range;

  Range slice(int rank) const { return slice_of(range.size(), rank, it.world, it.element); }
  std::byte* data(Range part) const { return it.data + (range.first + part.first) * it.element; }

  void copy_in() const {
    std::byte* staged = it.engine.staging.open_input(number);
    const Range own = slice(it.rank);
    copy_bytes(staged, data({0, 0}), own.first * it.element);
    copy_bytes(staged + own.last * it.element, data(own) + own.size() * it.element,
                (range.size() - own.last) * it.element);
    it.engine.staging.close_input(number);
  }

  void fold_own() const {
    Staging& staging = it.engine.staging;
    staging.wait_inputs(number);
    const Range own = slice(it.rank);
    const void* inputs[max_world];
    for (int rank = 0; rank < it.world; ++rank) inputs[rank] = staging.input(rank, number) + own.first * it.element;
    inputs[it.rank] = data(own);
    it.engine.tell_finite(it.fold_into(data(own), inputs, own.size()));
    it.mesh.enter(Phase::writing);
    copy_bytes(staging.result(it.rank, number), data(own), own.size() * it.element);
    staging.close_output(number);
  }

  void copy_out() const {
    for (int step = 1; step < it.world; ++step) {
      const int owner = (it.rank + step) % it.world;
      const Range theirs = slice(owner);
      it.engine.staging.wait_output(owner, number);
      copy_bytes(data(theirs), it.engine.staging.result(owner, number), theirs.size() * it.element);
    }
  }
};

struct StagedPieces {
  const Reduction& it;
  uint64_t step = it.mesh.layout().piece_bytes / it.element;
  uint64_t total = (it.call.count + step - 1) / step;

  StagedPiece operator[](uint64_t k) const {
    return {it, it.engine.staging.next() + k, {k * step, std::min((k + 1) * step, it.call.count)}};
  }
};

void fold_staged(const Reduction& it, bool first_is_in) {
  const StagedPieces pieces{it};
  if (!first_is_in) pieces[0].copy_in();
  for (uint64_t k = 0; k < pieces.total; ++k) {
    if (k + 1 < pieces.total) pieces[k + 1].copy_in();
    pieces[k].fold_own();
    pieces[k].copy_out();
  }
  it.engine.hear_finite();
  it.engine.staging.advance(pieces.total);
}

}  // namespace

Range slice_of(uint64_t count, int rank, int world, size_t element_bytes) {
  const uint64_t line = 64 / element_bytes;
  const uint64_t lines = (count + line - 1) / line;
  const auto cut = [&](uint64_t k) { return std::min(count, lines / world * k * line + std::min(k, lines % world) * line); };
  return {cut(uint64_t(rank)), cut(uint64_t(rank) + 1)};
}

// The owner of a slice folds it over all buffers in place and pushes the result into all of them,
// in pieces small enough that what it has just read and computed is still in its cache.
bool fold_slice(Engine& engine, const Call& call, std::byte* const* buffers) {
  const Reduction it{engine, call};
  const Range slice = slice_of(it.call.count, it.rank, it.world, it.element);
  const uint64_t step = std::max<uint64_t>(1, it.mesh.settings().fold_bytes / it.element);
  bool finite = true;
  for (uint64_t first = slice.first; first < slice.last; first += step) {
    const uint64_t count = std::min(step, slice.last - first);
    const void* inputs[max_world];
    for (int rank = 0; rank < it.world; ++rank) inputs[rank] = buffers[rank] + first * it.element;
    std::byte* mine = buffers[it.rank] + first * it.element;
    finite &= it.fold_into(mine, inputs, count);
    it.mesh.enter(Phase::writing);
    for (int rank = 0; rank < it.world; ++rank)
      if (rank != it.rank) copy_bytes(buffers[rank] + first * it.element, mine, count * it.element);
  }
  return finite;
}

// The way is a function of the size and of what all have announced, so all take the same.
//
//   bytes                       all shared    none shared    some shared
//   <= direct_from_bytes        small         small          small
//   <= slot_bytes               direct        small          staged
//   more                        direct        staged         staged
void all_reduce(Engine& engine, const Call& call) {
  if (engine.mesh.world() == 1) return barrier(engine, call);
  const Reduction it{engine, call};
  Agreement& agreement = engine.agreement;
  const Settings& settings = it.mesh.settings();
  const bool tiny = it.bytes() <= settings.direct_from_bytes && it.bytes() <= settings.slot_bytes;
  const bool fits = it.bytes() <= settings.slot_bytes;
  const uint64_t offset = tiny ? private_memory : engine.offset_of(call.output, it.bytes());
  const bool is_private = offset == private_memory;
  if (is_private && fits) copy_to_slot(it);
  // The first piece is copied before it is known that all agree: that hides the copy behind the wait.
  if (is_private && !fits) StagedPieces{it}[0].copy_in();
  agreement.announce(call, offset);
  agreement.reach(call);
  if (agreement.all_shared()) return fold_in_place(it);
  if (fits && agreement.all_private()) return fold_slots(it);
  fold_staged(it, is_private && !fits);
}

}  // namespace syncline
