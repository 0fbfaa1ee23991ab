// The settings of a group. Those marked (shared) must be the same on every rank; joining checks it.
#pragma once

#include <cstdint>
#include <functional>

namespace syncline {

// Moments at which tests stop or kill a rank.
enum class Phase { before, copy_in, agreed, writing, finishing, worker };

struct Settings {
  double deadline_s = 300;        // longest wait without progress before a rank is called stalled
  double join_deadline_s = 60;    // longest wait for all ranks to appear
  uint64_t arena_bytes = uint64_t(64) << 30;  // address space per rank, not memory; halved until it fits
  uint64_t slot_bytes = 16 << 10;             // (shared) largest message that goes in one pass
  uint64_t piece_bytes = 256 << 10;           // (shared) unit of staging for memory that peers cannot reach
  uint64_t direct_from_bytes = 8 << 10;       // (shared) above this, shared buffers are reduced in place
  uint64_t fold_bytes = 16 << 10;             // in-place reduction goes piece by piece, so that results are still in cache
  int spin_rounds = 100;          // polls before yielding; not used with more ranks than cores
  int yield_us = 1000;            // yielding before sleeping
  bool assume_crowded = false;    // behave as if there were more ranks than cores

  std::function<void()> check_signals;   // called now and then while a caller waits; may throw
  std::function<void(Phase)> on_phase;   // for tests
};

}  // namespace syncline
