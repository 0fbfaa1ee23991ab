#include "forked.h"

#include <pthread.h>

#include <atomic>

namespace syncline {

namespace {

// How many forks lie between the first process and this one. Process-wide by nature.
std::atomic<unsigned>& generation() {
  static std::atomic<unsigned> forks{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { generation().fetch_add(1); });
  (void)registered;
  return forks;
}

}  // namespace

Birthplace::Birthplace() : generation_(generation().load()) {}

bool Birthplace::here() const { return generation_ == generation().load(std::memory_order_relaxed); }

}  // namespace syncline
