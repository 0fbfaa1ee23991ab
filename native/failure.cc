#include "failure.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace syncline {

namespace {

// state: bit 0 claimed, bit 1 text complete, bits 8-15 kind, bits 16-31 culprit.
constexpr uint64_t claimed = 1;
constexpr uint64_t complete = 2;

uint64_t pack(FailureKind kind, int culprit) { return claimed | uint64_t(kind) << 8 | uint64_t(culprit) << 16; }

// The proposer may be killed between claim and text; then the kind and the rank must do.
uint64_t completed_state(const FailureRecord& record) {
  uint64_t state = record.state.load(std::memory_order_acquire);
  for (int tries = 0; tries < 100 && state != 0 && !(state & complete); ++tries) {
    const timespec millisecond{0, 1'000'000};
    nanosleep(&millisecond, nullptr);
    state = record.state.load(std::memory_order_acquire);
  }
  return state;
}

}  // namespace

void propose_failure(FailureRecord& record, FailureKind kind, int culprit, const std::string& text) {
  uint64_t expected = 0;
  if (!record.state.compare_exchange_strong(expected, pack(kind, culprit))) return;
  const size_t length = std::min(text.size(), sizeof record.text - 1);
  std::memcpy(record.text, text.data(), length);
  record.text[length] = '\0';
  record.state.store(pack(kind, culprit) | complete, std::memory_order_release);
}

void raise_failure(const FailureRecord& record) {
  const uint64_t state = completed_state(record);
  if (state == 0) return;
  const int culprit = int(state >> 16 & 0xffff);
  const std::string text = state & complete ? record.text : "rank " + std::to_string(culprit) + " failed";
  switch (FailureKind(state >> 8 & 0xff)) {
    case FailureKind::lost: throw PeerLost(culprit, text);
    case FailureKind::stalled: throw PeerStalled(culprit, text);
    default: throw Aborted(culprit, text);
  }
}

}  // namespace syncline
