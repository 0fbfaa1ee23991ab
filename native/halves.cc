#include "halves.h"

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace syncline {

namespace {

constexpr size_t large = 1 << 20;  // elements of a buffer that goes past the cache
constexpr size_t step = 256;       // elements that are made in the first-level cache

// NaN stays NaN.
void saturate(float* __restrict out, const float* __restrict in, size_t count, float most) {
  for (size_t i = 0; i < count; ++i) {
    const float below = in[i] > most ? most : in[i];
    out[i] = below < -most ? -most : below;
  }
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

void widen_buffer(float* out, const void* in, size_t count, DataType dtype) {
  count < large ? widen(out, in, count, dtype) : widen_past_cache(out, in, count, dtype);
}

}  // namespace syncline
