#include "mesh.h"

#include <sched.h>

#include <utility>

namespace syncline {

namespace {

int usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

}  // namespace

Mesh::Mesh(Membership members, const Settings& settings)
    : rank_(members.rank),
      world_(members.world),
      settings_(settings),
      layout_{settings.slot_bytes, settings.piece_bytes},
      arena_(std::move(members.arena)),
      peers_(std::move(members.peers)),
      lifelines_(std::move(members.lifelines)),
      keeper_(std::move(members.keeper)),
      deadline_s_(settings.deadline_s) {
  for (int peer = 0; peer < world_; ++peer) {
    bases_.push_back(peer == rank_ ? arena_->data() : peers_[peer].data());
    // A negative descriptor is skipped by poll.
    polls_.push_back({peer == rank_ ? -1 : lifelines_[peer].get(), POLLIN, 0});
  }
  const bool crowded = settings.assume_crowded || world_ > usable_cores();
  spin_rounds_ = crowded ? 0 : settings.spin_rounds;
}

void Mesh::set_operation(const Call& call) {
  operation_ = &call;
  deadline_s_ = call.deadline_s > 0 ? call.deadline_s : settings_.deadline_s;
}

void Mesh::fail(FailureKind kind, int culprit, const std::string& text) {
  propose_failure(failure(), kind, culprit, text + " (found by rank " + std::to_string(rank_) + ")");
  raise_failure(failure());
  std::terminate();  // not reached: the record holds a failure
}

}  // namespace syncline
