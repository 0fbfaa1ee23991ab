// The collectives that are written by hand, for speed; every other algorithm is a schedule (schedule.h).
//
//   small    one pass: the data lies beside the announcement; everybody reads everybody's
//   direct   all data is in shared memory: peers read it in place, and all wait until all are done
//   staged   some data is not: everybody's goes through staging, in pieces
#pragma once

#include "agreement.h"
#include "handle.h"
#include "mailbox.h"
#include "mesh.h"
#include "staging.h"
#include "types.h"

namespace syncline {

struct Engine {
  explicit Engine(Membership members, const Settings& settings)
      : mesh(std::move(members), settings), agreement(mesh), staging(mesh), mailbox(mesh) {}

  // Where peers find this memory, or private_memory.
  uint64_t offset_of(const void* data, uint64_t bytes) const {
    return mesh.arena().contains(data, bytes) ? mesh.arena().offset_of(data) : private_memory;
  }

  // Tells all that this rank no longer reads their memory, and waits for them to say the same.
  void finish_together() {
    mesh.enter(Phase::finishing);
    mesh.signal(&Control::done, agreement.sequence());
    mesh.wait_for_all(&Control::done, agreement.sequence());
  }

  // Each rank knows whether its own slice of a result is finite. A word about one that is not is written before the
  // signal that the slice is done, and heard after the wait for it; nobody writes another before all have announced
  // the next operation, and so have heard this one.
  void tell_finite(bool slice_is) {
    if (!slice_is) mesh.control(mesh.rank()).not_finite.store(agreement.sequence(), std::memory_order_relaxed);
  }
  void hear_finite() {
    finite = Finite::yes;
    for (int rank = 0; rank < mesh.world(); ++rank)
      if (mesh.control(rank).not_finite.load(std::memory_order_relaxed) == agreement.sequence()) finite = Finite::no;
  }

  Finite finite = Finite::unknown;  // the result of the running operation
  Mesh mesh;
  Agreement agreement;
  Staging staging;
  Mailbox mailbox;
  std::shared_ptr<Buffer> scratch;  // of schedules; kept from one to the next
};

// [first, last) of `count` elements, for one rank of `world`; cut at cache lines.
struct Range {
  uint64_t first, last;
  uint64_t size() const { return last - first; }
};
Range slice_of(uint64_t count, int rank, int world, size_t element_bytes);

// The reading and writing of an all-reduce of shared buffers: this rank's slice of all of them, without waiting.
// Returns whether the slice is finite.
bool fold_slice(Engine&, const Call&, std::byte* const* buffers);

void barrier(Engine&, const Call&);
void all_reduce(Engine&, const Call&);
void reduce_scatter(Engine&, const Call&);
void all_gather(Engine&, const Call&);
void broadcast(Engine&, const Call&);
void all_to_all(Engine&, const Call&);

}  // namespace syncline
