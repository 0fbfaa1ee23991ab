#include "halves.h"

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace syncline {

namespace {

constexpr size_t streams = 4;
constexpr size_t step = 256;  // elements of a stream before the next one's turn

// Calls `work(at, how_many)` for all elements, in turns; what does not divide comes last.
template <class Work>
void in_streams(size_t count, const Work& work) {
  const size_t each = count / streams / step * step;
  for (size_t at = 0; at < each; at += step)
    for (size_t stream = 0; stream < streams; ++stream) work(stream * each + at, step);
  work(streams * each, count - streams * each);
}

// NaN stays NaN.
void saturate(float* __restrict out, const float* __restrict in, size_t count, float most) {
  for (size_t i = 0; i < count; ++i) {
    const float below = in[i] > most ? most : in[i];
    out[i] = below < -most ? -most : below;
  }
}

}  // namespace

void narrow_buffer(void* out, const float* in, size_t count, DataType dtype) {
  auto* halves = static_cast<uint16_t*>(out);
  in_streams(count, [&](size_t at, size_t now) { narrow(halves + at, in + at, now, dtype); });
}

void narrow_saturated(void* out, const float* in, size_t count, DataType dtype) {
  const float most = dtype == DataType::float16 ? 65504.0f : 0x1.fep127f;
  auto* halves = static_cast<uint16_t*>(out);
  in_streams(count, [&](size_t at, size_t now) {
    for (size_t end = at + now; at < end; at += step) {
      float some[step];
      const size_t few = std::min(step, end - at);
      saturate(some, in + at, few, most);
      narrow(halves + at, some, few, dtype);
    }
  });
}

void widen_buffer(float* out, const void* in, size_t count, DataType dtype) {
  const auto* halves = static_cast<const uint16_t*>(in);
  in_streams(count, [&](size_t at, size_t now) { widen(out + at, halves + at, now, dtype); });
}

}  // namespace syncline
