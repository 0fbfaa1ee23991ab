// Any collective, as a program: what one rank does with its own buffer and with those of its peers.
//
//   opcode      a      b      c       meaning
//   wait        peer   step           until that peer has signalled this step of this operation; 0 has always been
//   pull_add    peer   lo     hi      own[lo, hi) = own op peer's (the lower rank's operand first)
//   pull_copy   peer   lo     hi      own[lo, hi) = peer's
//   fold        lo     hi     mask    own[lo, hi) = fold of the buffers of the ranks in the mask, in rank order
//   finish      lo     hi             divide by the number of ranks, if the reduction is a mean
//   signal      step                  tells the peers that this rank has come this far; never goes back
//
// The buffer is reached by peers while the program runs, so a program must not overwrite what a peer may
// still want to read; who waits for whom is the compiler's business. Buffers are private until all ranks
// have announced the operation, and none returns before all have finished.
//
// A buffer that peers cannot reach is worked on in a shared copy. One of 16-bit floats is worked on in
// float32, so partial sums are not rounded; it is rounded once, at the end.
#pragma once

#include <cstdint>

#include "types.h"

namespace syncline {

enum class Opcode : int64_t { wait, pull_add, pull_copy, fold, finish, signal };

// Throws std::invalid_argument for a row that names a wrong peer, range or opcode.
void validate_program(const Call&, int world);

struct Engine;
void run_schedule(Engine&, const Call&);

}  // namespace syncline
