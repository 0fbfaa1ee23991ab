// A condition variable that a forked child may destroy.
//
// Threads of the parent that wait on it count as waiting in the child too, where the destructor would wait for them.
#pragma once

#include <condition_variable>
#include <memory>

#include "forked.h"

namespace syncline {

class Condition {
 public:
  ~Condition() {
    if (!birthplace_.here()) (void)condition_.release();
  }
  std::condition_variable* operator->() { return condition_.get(); }

 private:
  Birthplace birthplace_;
  std::unique_ptr<std::condition_variable> condition_ = std::make_unique<std::condition_variable>();
};

}  // namespace syncline
