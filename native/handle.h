// The future of an operation that was submitted.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>

namespace syncline {

class Handle {
 public:
  bool done() const;

  // True when the operation is done, false when `seconds` passed first; negative means no limit.
  // Throws what the operation threw.
  bool wait(double seconds = -1);

  void complete(std::exception_ptr error);  // for the worker

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

}  // namespace syncline
