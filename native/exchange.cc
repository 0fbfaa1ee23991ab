// The collectives in which every rank only reads what others give: one shape, four meanings.
#include <algorithm>

#include "collectives.h"
#include "kernels.h"

namespace syncline {

namespace {

// What a rank gives: `blocks` blocks of `count` elements, one after another.
struct Gift {
  const std::byte* data;
  int blocks;
  uint64_t count;
  size_t element;

  uint64_t bytes() const { return uint64_t(blocks) * count * element; }
};

// What a rank finds: elements `range` of block b of rank r, wherever it lies.
struct Given {
  const std::byte* sources[max_world];
  uint64_t stride_bytes;  // between blocks
  Range range;

  const std::byte* block(int rank, int b) const { return sources[rank] + uint64_t(b) * stride_bytes; }
};

template <class Take>
void exchange_small(Engine& engine, const Gift& gift, const Take& take) {
  Given given{{}, gift.count * gift.element, {0, gift.count}};
  for (int rank = 0; rank < engine.mesh.world(); ++rank)
    given.sources[rank] = engine.mesh.base(rank) + engine.mesh.layout().slot(engine.agreement.sequence());
  take(given);
}

template <class Take>
void exchange_direct(Engine& engine, const Gift& gift, const Take& take) {
  Given given{{}, gift.count * gift.element, {0, gift.count}};
  for (int rank = 0; rank < engine.mesh.world(); ++rank)
    given.sources[rank] = engine.mesh.base(rank) + engine.agreement.offset(rank);
  engine.mesh.enter(Phase::writing);
  take(given);
  engine.finish_together();
}

// Piece k holds the same range of every block, packed.
void stage_gift(Engine& engine, const Gift& gift, uint64_t number, Range range, bool gives) {
  std::byte* staged = engine.staging.open_input(number);
  const uint64_t bytes = range.size() * gift.element;
  for (int b = 0; gives && b < gift.blocks; ++b)
    copy_bytes(staged + b * bytes, gift.data + (uint64_t(b) * gift.count + range.first) * gift.element, bytes);
  engine.staging.close_input(number);
}

template <class Take>
void take_staged(Engine& engine, const Gift& gift, uint64_t number, Range range, const Take& take) {
  engine.staging.wait_inputs(number);
  Given given{{}, range.size() * gift.element, range};
  for (int rank = 0; rank < engine.mesh.world(); ++rank) given.sources[rank] = engine.staging.input(rank, number);
  engine.mesh.enter(Phase::writing);
  take(given);
  engine.staging.close_output(number);
}

template <class Take>
void exchange_staged(Engine& engine, const Gift& gift, bool gives, const Take& take) {
  const uint64_t step = engine.mesh.layout().piece_bytes / (uint64_t(gift.blocks) * gift.element);
  const uint64_t pieces = (gift.count + step - 1) / step;
  const uint64_t start = engine.staging.next();
  const auto range = [&](uint64_t k) { return Range{k * step, std::min((k + 1) * step, gift.count)}; };
  if (pieces > 0) stage_gift(engine, gift, start, range(0), gives);
  for (uint64_t k = 0; k < pieces; ++k) {
    if (k + 1 < pieces) stage_gift(engine, gift, start + k + 1, range(k + 1), gives);
    take_staged(engine, gift, start + k, range(k), take);
  }
  engine.staging.advance(pieces);
}

// `gives` is false on a rank that only takes (broadcast); its memory is then of no interest.
template <class Take>
void exchange(Engine& engine, const Call& call, const Gift& gift, bool gives, const Take& take) {
  const bool small = gift.bytes() <= engine.mesh.settings().slot_bytes;
  const uint64_t offset = small ? private_memory : gives ? engine.offset_of(gift.data, gift.bytes()) : 0;
  if (small && gives) {
    engine.mesh.enter(Phase::copy_in);
    copy_bytes(engine.mesh.base(engine.mesh.rank()) + engine.mesh.layout().slot(engine.agreement.sequence()),
           gift.data, gift.bytes());
  }
  engine.agreement.announce(call, offset);
  engine.agreement.reach(call);
  if (small) return exchange_small(engine, gift, take);
  if (engine.agreement.all_shared()) return exchange_direct(engine, gift, take);
  exchange_staged(engine, gift, gives, take);
}

const std::byte* bytes_at(const void* pointer) { return static_cast<const std::byte*>(pointer); }

// In place, a rank's own block already lies where it belongs.
void place(void* output, uint64_t element_index, size_t element, const std::byte* source, uint64_t count) {
  std::byte* target = static_cast<std::byte*>(output) + element_index * element;
  if (target != source) copy_bytes(target, source, count * element);
}

}  // namespace

void barrier(Engine& engine, const Call& call) {
  engine.agreement.announce(call, private_memory);
  engine.agreement.reach(call);
}

void reduce_scatter(Engine& engine, const Call& call) {
  const int rank = engine.mesh.rank(), world = engine.mesh.world();
  const size_t element = size_of(call.dtype);
  exchange(engine, call, {bytes_at(call.input), world, call.count, element}, true, [&](const Given& given) {
    const void* inputs[max_world];
    for (int peer = 0; peer < world; ++peer) inputs[peer] = given.block(peer, rank);
    fold(static_cast<std::byte*>(call.output) + given.range.first * element, inputs, world, given.range.size(),
         call.dtype, call.op);
  });
}

void all_gather(Engine& engine, const Call& call) {
  const size_t element = size_of(call.dtype);
  exchange(engine, call, {bytes_at(call.input), 1, call.count, element}, true, [&](const Given& given) {
    for (int peer = 0; peer < engine.mesh.world(); ++peer)
      place(call.output, uint64_t(peer) * call.count + given.range.first, element, given.block(peer, 0),
            given.range.size());
  });
}

void broadcast(Engine& engine, const Call& call) {
  const size_t element = size_of(call.dtype);
  const bool gives = engine.mesh.rank() == call.root;
  exchange(engine, call, {bytes_at(call.output), 1, call.count, element}, gives, [&](const Given& given) {
    if (!gives) place(call.output, given.range.first, element, given.block(call.root, 0), given.range.size());
  });
}

void all_to_all(Engine& engine, const Call& call) {
  const int rank = engine.mesh.rank(), world = engine.mesh.world();
  const size_t element = size_of(call.dtype);
  exchange(engine, call, {bytes_at(call.input), world, call.count, element}, true, [&](const Given& given) {
    for (int peer = 0; peer < world; ++peer)
      place(call.output, uint64_t(peer) * call.count + given.range.first, element, given.block(peer, rank),
            given.range.size());
  });
}

}  // namespace syncline
