// The ranks of one machine as seen by one of them: everybody's memory, who is alive, and waiting.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "failure.h"
#include "layout.h"
#include "segment.h"
#include "settings.h"
#include "types.h"

namespace syncline {

// What joining yields; see join.h.
struct Membership {
  int rank = 0;
  int world = 1;
  std::shared_ptr<Arena> arena;      // own
  std::vector<Mapping> peers;        // by rank; the own entry is empty
  std::vector<Descriptor> lifelines; // by rank; becomes readable when that process ends; the own entry is empty
  Descriptor keeper;                 // what keeps the own lifeline quiet, where it is a pipe
};

class Mesh {
 public:
  Mesh(Membership, const Settings&);

  int rank() const { return rank_; }
  int world() const { return world_; }
  const Settings& settings() const { return settings_; }
  const Layout& layout() const { return layout_; }
  Arena& arena() const { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }

  std::byte* base(int rank) const { return bases_[rank]; }
  Control& control(int rank) const { return *reinterpret_cast<Control*>(bases_[rank] + Layout::control()); }
  Control& own() const { return control(rank_); }
  Post& post(int rank) const { return *reinterpret_cast<Post*>(bases_[rank] + Layout::post()); }
  FailureRecord& failure() const { return control(0).failure; }

  // Sets one of this rank's words and wakes whoever sleeps on it.
  void signal(Word word, uint64_t value) { signal(own().*word, value); }
  void signal(std::atomic<uint64_t>& own_word, uint64_t value);

  // Returns when the word of that rank, or of all ranks, has reached the value. Throws a FabricError when
  // the group fails, a missing rank dies, or the deadline passes.
  void wait_for(int peer, Word word, uint64_t at_least) { wait_for(peer, control(peer).*word, at_least); }
  void wait_for(int peer, std::atomic<uint64_t>& word_of_peer, uint64_t at_least);
  void wait_for_all(Word, uint64_t at_least);

  // Makes the failure known to all ranks and throws it (or the one that came first).
  [[noreturn]] void fail(FailureKind, int culprit, const std::string& text);

  // The rank that this one is really waiting for now, or -1; for other threads to ask.
  int suspect() const;

  // The operation that waits are part of: its deadline, and its name in errors. Not copied.
  void set_operation(const Call&);
  void interrupt(const char* why) { interruption_.store(why); }
  void enter(Phase phase) const {
    if (settings_.on_phase) settings_.on_phase(phase);
  }

  bool check_signals_here = true;  // false while a worker thread runs the operation

 private:
  struct Wait;

  void wait(const Wait&);
  bool spin(const Wait&) const;
  bool yield(const Wait&) const;
  void sleep(const Wait&);
  void doze(const Wait&) const;
  void check(const Wait&, uint64_t started_ns);
  void check_lifelines(const Wait&);
  int culprit_behind(int peer) const;
  bool still_waits(const Control&, int* next) const;
  void publish_wait(const Wait&) const;

  int rank_;
  int world_;
  Settings settings_;
  Layout layout_;
  std::shared_ptr<Arena> arena_;
  std::vector<Mapping> peers_;
  std::vector<Descriptor> lifelines_;
  Descriptor keeper_;
  std::vector<std::byte*> bases_;
  std::vector<pollfd> polls_;
  int spin_rounds_;
  const Call* operation_ = nullptr;
  std::atomic<double> deadline_s_;
  std::atomic<const char*> interruption_{nullptr};
};

}  // namespace syncline
