// Every operation begins here: each rank announces what it is about to do, waits until all have, and
// compares, so that no byte moves before all agree.
//
// Announcements are double buffered by the parity of the sequence number. That is enough: a rank writes
// number n + 2 only after it has seen everybody's n + 1, and a rank sends n + 1 only after it has read all of n.
#pragma once

#include "mesh.h"
#include "types.h"

namespace syncline {

class Agreement {
 public:
  explicit Agreement(Mesh& mesh) : mesh_(mesh) {}

  // The number of the operation being prepared or run; its parity picks the slot.
  uint64_t sequence() const { return sequence_; }
  void prepare() { ++sequence_; }

  // `offset` is where peers find this rank's data, or private_memory. Everything that this rank has
  // written before is visible to a peer that has seen the announcement.
  void announce(const Call&, uint64_t offset);

  // Returns when all ranks have announced the same; otherwise throws Desync on all of them.
  void reach(const Call&);

  uint64_t reached_ns() const { return reached_ns_; }  // when all ranks had announced the last operation
  uint64_t offset(int rank) const { return announcement(rank).offset; }
  bool all_shared() const;
  bool all_private() const;

 private:
  const Announcement& announcement(int rank) const { return mesh_.control(rank).descriptors[sequence_ % 2]; }
  bool same_as_mine(int rank) const;
  std::string said_by(int rank) const;
  [[noreturn]] void raise_desync();

  Mesh& mesh_;
  uint64_t sequence_ = 0;
  uint64_t reached_ns_ = 0;
};

}  // namespace syncline
