// Staging: moving data that peers cannot reach through shared memory, piece by piece.
//
// Pieces are numbered without end through the life of the group and alternate between two buffers.
// staged_in = n says that a rank has put pieces below n into its buffers; staged_out = n that it has read
// everybody's pieces below n. A rank fills a buffer again only when all have read it, and its own order is
//   in(0), in(1), out(0), in(2), out(1), ...
// so that it fills one buffer while others still read the other.
#pragma once

#include "mesh.h"

namespace syncline {

class Staging {
 public:
  explicit Staging(Mesh& mesh) : mesh_(mesh) {}

  uint64_t next() const { return next_; }  // number of the first piece of the next operation
  void advance(uint64_t pieces) { next_ += pieces; }

  // Gives up the next piece, which some ranks may have filled for an operation that never took place: if its number
  // were used again, peers would take the old content for the new. All ranks must do this.
  void skip() {
    close_input(next_);
    close_output(next_);
    ++next_;
  }

  // Waits until the own buffer of this piece may be filled.
  std::byte* open_input(uint64_t piece) {
    if (piece >= 2) mesh_.wait_for_all(&Control::staged_out, piece - 1);
    mesh_.enter(Phase::copy_in);
    return mesh_.base(mesh_.rank()) + mesh_.layout().staged(piece);
  }
  void close_input(uint64_t piece) { mesh_.signal(&Control::staged_in, piece + 1); }

  void wait_inputs(uint64_t piece) { mesh_.wait_for_all(&Control::staged_in, piece + 1); }
  const std::byte* input(int rank, uint64_t piece) const { return mesh_.base(rank) + mesh_.layout().staged(piece); }

  // A second pair of buffers, for what a rank hands back. All have read the one before last when their
  // input of this piece is there, because in(n + 2) comes after out(n) in everybody's order.
  std::byte* result(int rank, uint64_t piece) const { return mesh_.base(rank) + mesh_.layout().result(piece); }
  void close_output(uint64_t piece) { mesh_.signal(&Control::staged_out, piece + 1); }
  void wait_output(int rank, uint64_t piece) { mesh_.wait_for(rank, &Control::staged_out, piece + 1); }

 private:
  Mesh& mesh_;
  uint64_t next_ = 0;
};

}  // namespace syncline
