// How ranks meet: over a local socket, once.
//
//   1. everyone sends rank 0 a hello with two descriptors: its arena, and a lifeline
//   2. rank 0 sends everyone the descriptors of all
//   3. everyone maps all arenas, reads the header in each (which proves that the memory is really shared),
//      and tells rank 0; when all have, rank 0 tells all, and the socket is closed
//
// A lifeline is a descriptor that becomes readable when its owner's process ends: a pidfd, which the owner
// opens on itself. Passed as a descriptor it needs no process number, so it works between pid namespaces and
// cannot be confused by a number that is used again. Where the kernel has no pidfd it is the read end of a
// pipe whose write end the owner keeps (a child it forked would keep that open, hence second choice).
#pragma once

#include <string>
#include <vector>

#include "layout.h"
#include "mesh.h"
#include "settings.h"

namespace syncline {

// `address` is a path, or a name in the abstract namespace if it starts with '@'. Throws JoinError.
Membership join(const std::string& address, int rank, int world, const Nonce& nonce, const Settings&);

// All ranks of a world as threads of this process, at the same addresses, so that a thread sanitizer sees both
// sides of every access. All arenas must outlive all groups.
std::vector<Membership> join_threads(int world, const Settings&);

}  // namespace syncline
