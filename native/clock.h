// The clock that all processes of a machine share.
#pragma once

#include <time.h>

#include <cstdint>

namespace syncline {

inline uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

}  // namespace syncline
