#include "handle.h"

#include <chrono>

namespace syncline {

bool Handle::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool Handle::wait(double seconds) {
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done_; };
  if (seconds < 0) {
    changed_->wait(lock, is_done);
  } else if (!changed_->wait_for(lock, std::chrono::duration<double>(seconds), is_done)) {
    return false;
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

Times Handle::times() const {
  const std::lock_guard lock(mutex_);
  return times_;
}

Finite Handle::finite() const {
  const std::lock_guard lock(mutex_);
  return finite_;
}

void Handle::complete(std::exception_ptr error, Times times, Finite finite) {
  const std::lock_guard lock(mutex_);
  times_ = times;
  finite_ = finite;
  done_ = true;
  error_ = std::move(error);
  changed_->notify_all();
}

}  // namespace syncline
