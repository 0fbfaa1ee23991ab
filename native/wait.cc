// Waiting: the one place where a rank waits for another.
//
// Poll for a moment (only if every rank can have a core), yield for a little longer, then sleep in the
// kernel in short slices. Between slices look for a failure, for dead peers, and at the deadline.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "clock.h"
#include "mesh.h"

namespace syncline {

static_assert(std::endian::native == std::endian::little, "the kernel sleeps on the lower half of a word");

namespace {

constexpr uint64_t slice_ns = 20'000'000;
constexpr double second_ns = 1e9;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t* lower_half(std::atomic<uint64_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

void futex_wait(std::atomic<uint64_t>& word, uint64_t seen) {
  const timespec slice{0, slice_ns};
  syscall(SYS_futex, lower_half(word), FUTEX_WAIT, uint32_t(seen), &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<uint64_t>& word) {
  syscall(SYS_futex, lower_half(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

uint64_t offset_in_control(const Control& control, const std::atomic<uint64_t>& word) {
  return uint64_t(reinterpret_cast<const std::byte*>(&word) - reinterpret_cast<const std::byte*>(&control));
}

}  // namespace

struct Mesh::Wait {
  int peer;
  std::atomic<uint64_t>& word;
  uint64_t at_least;
  Control& control;
  bool for_all;

  bool over() const { return word.load(std::memory_order_acquire) >= at_least; }
  // The same word of another rank.
  const std::atomic<uint64_t>& word_of(const Control& other) const {
    const auto* start = reinterpret_cast<const std::byte*>(&other);
    return *reinterpret_cast<const std::atomic<uint64_t>*>(start + offset_in_control(control, word));
  }
};

// The writer stores the word and then reads `sleepers`; a sleeper raises `sleepers` and then reads the
// word. All four are sequentially consistent, so at least one of the two sees the other.
void Mesh::signal(std::atomic<uint64_t>& own_word, uint64_t value) {
  own_word.store(value, std::memory_order_seq_cst);
  if (own().sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(own_word);
}

void Mesh::wait_for(int peer, std::atomic<uint64_t>& word_of_peer, uint64_t at_least) {
  wait({peer, word_of_peer, at_least, control(peer), false});
}

void Mesh::wait_for_all(Word word, uint64_t at_least) {
  for (int peer = 0; peer < world_; ++peer)
    if (peer != rank_) wait({peer, control(peer).*word, at_least, control(peer), true});
}

void Mesh::wait(const Wait& wait) {
  if (wait.over() || spin(wait) || yield(wait)) return;
  sleep(wait);
}

bool Mesh::spin(const Wait& wait) const {
  for (int round = 0; round < spin_rounds_; ++round) {
    relax();
    if (wait.over()) return true;
  }
  return false;
}

bool Mesh::yield(const Wait& wait) const {
  const uint64_t end = now_ns() + uint64_t(settings_.yield_us) * 1000;
  while (!has_failed(failure())) {
    sched_yield();
    if (wait.over()) return true;
    if (now_ns() >= end) return false;
  }
  return false;
}

void Mesh::sleep(const Wait& wait) {
  const uint64_t started = now_ns();
  struct Published {  // withdrawn also when an error is thrown
    Control& control;
    ~Published() { control.waiting_for.store(0); }
  } published{own()};
  while (true) {
    publish_wait(wait);
    check(wait, started);
    doze(wait);
    if (wait.over()) return;
  }
}

void Mesh::doze(const Wait& wait) const {
  wait.control.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = wait.word.load(std::memory_order_seq_cst);
  if (seen < wait.at_least) futex_wait(wait.word, seen);
  wait.control.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Mesh::publish_wait(const Wait& wait) const {
  Control& mine = own();
  mine.heartbeat_ns.store(now_ns());
  mine.waiting_value.store(wait.at_least);
  mine.waiting_for.store(uint64_t(wait.peer + 1) | offset_in_control(wait.control, wait.word) << 16);
}

void Mesh::check(const Wait& wait, uint64_t started_ns) {
  raise_failure(failure());
  check_lifelines(wait);
  if (const char* why = interruption_.load())
    fail(FailureKind::aborted, rank_, "rank " + std::to_string(rank_) + " " + why + " during " + describe(*operation_));
  if (check_signals_here && settings_.check_signals) settings_.check_signals();
  if (double(now_ns() - started_ns) < deadline_s_ * second_ns) return;
  const int culprit = culprit_behind(wait.peer);
  fail(FailureKind::stalled, culprit,
       "rank " + std::to_string(culprit) + " did not answer within " + seconds_text(deadline_s_) + " during " +
           describe(*operation_));
}

// A rank that has already signalled what we wait for may be gone: it had finished. Any other may not.
void Mesh::check_lifelines(const Wait& wait) {
  poll(polls_.data(), polls_.size(), 0);
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || !(wait.for_all || peer == wait.peer)) continue;
    const bool left = control(peer).left.load() != 0;
    const bool died = polls_[peer].revents != 0;
    if (!left && !died) continue;
    if (wait.word_of(control(peer)).load(std::memory_order_acquire) >= wait.at_least) continue;
    fail(FailureKind::lost, peer,
         "rank " + std::to_string(peer) + (left ? " had closed the group" : " died") + " while the others were in " +
             describe(*operation_));
  }
}

// Follows who waits for whom until a rank that waits for nobody, or that stopped while it waited.
int Mesh::culprit_behind(int peer) const {
  for (int hops = 0; hops < world_; ++hops) {
    int next = peer;
    if (!still_waits(control(peer), &next) || next == rank_) return peer;
    peer = next;
  }
  return peer;
}

bool Mesh::still_waits(const Control& waiter, int* next) const {
  const uint64_t target = waiter.waiting_for.load();
  const int rank = int(target & 0xffff) - 1;
  const uint64_t offset = target >> 16;
  if (rank < 0 || rank >= world_ || offset > sizeof(Control)) return false;
  // A live waiter writes its heartbeat at every slice; an old one means that its process is stopped.
  const double patience_ns = std::max(10.0 * slice_ns, std::min(1.0, deadline_s_ / 2) * second_ns);
  if (double(now_ns()) - double(waiter.heartbeat_ns.load()) > patience_ns) return false;
  const auto* word = reinterpret_cast<const std::atomic<uint64_t>*>(base(rank) + Layout::control() + offset);
  // What it waits for is there, yet it has not gone on: it is the one that is stopped.
  if (word->load() >= waiter.waiting_value.load()) return false;
  *next = rank;
  return true;
}

int Mesh::suspect() const {
  int next = -1;
  if (!still_waits(own(), &next)) return -1;
  return culprit_behind(next);
}

}  // namespace syncline
