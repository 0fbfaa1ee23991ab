#include "halves.h"

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace syncline {

namespace {

constexpr size_t large = 1 << 20;  // elements of a buffer that goes past the cache
constexpr size_t step = 256;       // elements that are made in the first-level cache
constexpr size_t looked_at = 1 << 14;  // halves that are looked at while they are in a cache

// NaN stays NaN.
void saturate(float* __restrict out, const float* __restrict in, size_t count, float most) {
  for (size_t i = 0; i < count; ++i) {
    const float below = in[i] > most ? most : in[i];
    out[i] = below < -most ? -most : below;
  }
}

// Infinity and NaN have all bits of the exponent.
bool are_finite(const uint16_t* halves, size_t count, int16_t exponent) {
  int16_t largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, int16_t(halves[i] & exponent));
  return largest != exponent;
}

}  // namespace

void narrow_buffer(void* out, const float* in, size_t count, DataType dtype) {
  count < large ? narrow(out, in, count, dtype) : narrow_past_cache(out, in, count, dtype);
}

void narrow_saturated(void* out, const float* in, size_t count, DataType dtype) {
  const float most = dtype == DataType::float16 ? 65504.0f : 0x1.fep127f;
  auto* halves = static_cast<uint16_t*>(out);
  for (size_t at = 0; at < count; at += step) {
    float some[step];
    const size_t few = std::min(step, count - at);
    saturate(some, in + at, few, most);
    narrow(halves + at, some, few, dtype);
  }
}

bool widen_buffer(float* out, const void* in, size_t count, DataType dtype) {
  const auto* halves = static_cast<const uint16_t*>(in);
  const int16_t exponent = dtype == DataType::float16 ? 0x7c00 : 0x7f80;
  const auto widen_some = count < large ? widen : widen_past_cache;
  bool finite = true;
  for (size_t at = 0; at < count; at += looked_at) {
    const size_t now = std::min(looked_at, count - at);
    widen_some(out + at, halves + at, now, dtype);
    finite &= are_finite(halves + at, now, exponent);
  }
  return finite;
}

}  // namespace syncline
