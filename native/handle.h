// The future of an operation that was submitted.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>

#include "condition.h"

namespace syncline {

// When an operation began, when all ranks had arrived, and when it was over, on the machine's monotonic clock.
struct Times {
  uint64_t began_ns = 0, met_ns = 0, ended_ns = 0;
};

// Whether no element of a result is infinite or NaN.
enum class Finite : uint8_t { unknown, yes, no };
constexpr Finite finiteness(bool is) { return is ? Finite::yes : Finite::no; }

// What is known of an operation that went well.
struct Outcome {
  uint64_t met_ns;
  Finite finite = Finite::unknown;
};

class Handle {
 public:
  bool done() const;

  // True when the operation is done, false when `seconds` passed first; negative means no limit.
  // Throws what the operation threw.
  bool wait(double seconds = -1);

  Times times() const;  // all zero until it is done

  Finite finite() const;  // unknown until it is done

  void complete(std::exception_ptr error, Times = {}, Finite = Finite::unknown);  // for the worker

 private:
  mutable std::mutex mutex_;
  Condition changed_;
  bool done_ = false;
  std::exception_ptr error_;
  Times times_;
  Finite finite_ = Finite::unknown;
};

}  // namespace syncline
