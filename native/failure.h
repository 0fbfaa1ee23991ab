// The first failure of a group, agreed by all its ranks.
//
// Whoever finds that something is wrong proposes it; the first proposal wins by one compare-and-swap,
// and every rank, the proposer included, raises what the record says. So all survivors name the same rank.
#pragma once

#include <string>

#include "layout.h"

namespace syncline {

enum class FailureKind : uint8_t { none, lost, stalled, aborted };

void propose_failure(FailureRecord&, FailureKind, int culprit, const std::string& text);

inline bool has_failed(const FailureRecord& record) { return record.state.load(std::memory_order_acquire) != 0; }

// Throws PeerLost, PeerStalled or Aborted if there is a failure.
void raise_failure(const FailureRecord&);

}  // namespace syncline
