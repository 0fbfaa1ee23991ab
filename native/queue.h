// Calls in order of submission, whoever submits them.
//
// With nothing under way a blocking call runs in the caller's own thread; otherwise, and always when
// asynchronous, it goes to a worker thread that is started when first needed. One call runs at a time.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "condition.h"
#include "handle.h"
#include "types.h"

namespace syncline {

class Queue {
 public:
  // `perform` runs one call; its second argument says whether it is the worker that does.
  using Perform = std::function<Outcome(const Call&, bool in_worker)>;
  explicit Queue(Perform perform) : perform_(std::move(perform)) {}
  ~Queue() { stop(); }

  // Runs the call here and returns null, or hands it to the worker and returns its handle.
  std::shared_ptr<Handle> run_or_submit(const Call&);
  std::shared_ptr<Handle> submit(Call);

  void cancel(std::exception_ptr why);  // completes what has not begun with this error
  void stop();                          // refuses new calls, waits for those accepted, ends the thread
  void abandon();                       // in a forked child, where the thread does not exist and locks may be held

 private:
  struct Entry {
    Call call;
    std::shared_ptr<Handle> handle;
  };

  std::shared_ptr<Handle> enqueue(Call);
  void work();
  void run_next(std::unique_lock<std::mutex>&);

  Perform perform_;
  std::mutex mutex_;
  Condition changed_;
  std::deque<Entry> entries_;
  bool busy_ = false;  // a call is running, here or in the worker
  bool stopping_ = false;
  bool abandoned_ = false;
  std::unique_ptr<std::thread> worker_;
};

}  // namespace syncline
