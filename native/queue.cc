#include "queue.h"

#include <stdexcept>

#include "clock.h"

namespace syncline {

std::shared_ptr<Handle> Queue::run_or_submit(const Call& call) {
  std::unique_lock lock(mutex_);
  if (busy_ || !entries_.empty()) return enqueue(call);
  if (stopping_) throw std::logic_error("the group is closed");
  busy_ = true;
  lock.unlock();
  struct Idle {
    Queue& queue;
    ~Idle() {
      const std::lock_guard lock(queue.mutex_);
      queue.busy_ = false;
      if (queue.worker_ || queue.stopping_) queue.changed_->notify_all();
    }
  } idle{*this};
  perform_(call, false);
  return nullptr;
}

std::shared_ptr<Handle> Queue::submit(Call call) {
  const std::lock_guard lock(mutex_);
  return enqueue(std::move(call));
}

std::shared_ptr<Handle> Queue::enqueue(Call call) {
  if (stopping_) throw std::logic_error("the group is closed");
  if (!worker_) worker_ = std::make_unique<std::thread>([this] { work(); });
  auto handle = std::make_shared<Handle>();
  entries_.push_back({std::move(call), handle});
  changed_->notify_all();
  return handle;
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_->wait(lock, [this] { return !busy_ && (!entries_.empty() || stopping_); });
    if (entries_.empty()) return;
    run_next(lock);
  }
}

void Queue::run_next(std::unique_lock<std::mutex>& lock) {
  Entry entry = std::move(entries_.front());
  entries_.pop_front();
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  Times times{.began_ns = now_ns()};
  Outcome outcome{};
  try {
    outcome = perform_(entry.call, true);
    times.met_ns = outcome.met_ns;
  } catch (...) {
    error = std::current_exception();
  }
  times.ended_ns = now_ns();
  entry.handle->complete(error, times, outcome.finite);
  lock.lock();
  busy_ = false;
  changed_->notify_all();
}

void Queue::cancel(std::exception_ptr why) {
  const std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) entry.handle->complete(why);
  entries_.clear();
}

void Queue::stop() {
  if (abandoned_) return;
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_->notify_all();
  changed_->wait(lock, [this] { return !busy_ && entries_.empty(); });
  const std::unique_ptr<std::thread> worker = std::move(worker_);
  lock.unlock();
  if (worker) worker->join();
}

void Queue::abandon() {
  abandoned_ = true;
  (void)worker_.release();  // joining or detaching a thread that is not there is undefined
}

}  // namespace syncline
