// Stores that go past the cache, for what is not read again soon; included by the kernels, once per instruction set.
// A plain store first reads the line that it overwrites, and pushes something else out of the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace syncline {
namespace SYNCLINE_KERNELS {
namespace {

constexpr size_t line_bytes = 64;

// Elements from `data` on up to where a cache line begins.
template <class T>
size_t up_to_line(const T* data) {
  return -(reinterpret_cast<uintptr_t>(data) / sizeof(T)) % (line_bytes / sizeof(T));
}

// A cache line, to where one begins. What was streamed is seen by others after `finish_streaming`.
inline void stream_line(void* to, const void* from) {
#if defined(__AVX2__)
  const auto* halves = static_cast<const __m256i*>(from);
  const __m256i first = _mm256_loadu_si256(halves);
  const __m256i second = _mm256_loadu_si256(halves + 1);
  _mm256_stream_si256(static_cast<__m256i*>(to), first);
  _mm256_stream_si256(static_cast<__m256i*>(to) + 1, second);
#else
  std::memcpy(to, from, line_bytes);
#endif
}

inline void finish_streaming() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace SYNCLINE_KERNELS
}  // namespace syncline
