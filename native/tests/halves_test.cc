// 16-bit floats of any bits, in buffers of exactly their length, so that the address sanitizer sees every byte beyond.
#include "halves.h"

#include <cmath>
#include <memory>

#include "harness.h"
#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

constexpr DataType halves[] = {DataType::float16, DataType::bfloat16};
constexpr size_t lengths[] = {0, 1, 7, 255, 256, 257, 1023, 1024, 1025, 4095, 4097, 20'001, (1 << 20) + 33};

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

std::unique_ptr<uint16_t[]> any_bits(size_t count, Random& random) {
  std::unique_ptr<uint16_t[]> bits(new uint16_t[count]);
  for (size_t i = 0; i < count; ++i) bits[i] = uint16_t(random.next());
  return bits;
}

std::unique_ptr<float[]> any_floats(size_t count, Random& random) {
  std::unique_ptr<float[]> values(new float[count]);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t(random.next());
    std::memcpy(values.get() + i, &bits, sizeof bits);
  }
  return values;
}

}  // namespace

TEST(halves_of_any_bits_are_widened_in_bounds) {
  Random random(1);
  for (const DataType dtype : halves)
    for (const size_t count : lengths) {
      const auto bits = any_bits(count, random);
      const std::unique_ptr<float[]> out(new float[count]);
      widen_buffer(out.get(), bits.get(), count, dtype);
      for (size_t i = 0; i < count; ++i) CHECK(same(out[i], twin_widen(bits[i], dtype)), "%zu of %zu", i, count);
    }
}

TEST(floats_of_any_bits_are_narrowed_in_bounds) {
  Random random(2);
  for (const DataType dtype : halves)
    for (const size_t count : lengths) {
      const auto values = any_floats(count, random);
      const std::unique_ptr<uint16_t[]> plain(new uint16_t[count]), saturated(new uint16_t[count]);
      narrow_buffer(plain.get(), values.get(), count, dtype);
      narrow_saturated(saturated.get(), values.get(), count, dtype);
      for (size_t i = 0; i < count; ++i) {
        const float expected = twin_widen(twin_narrow(values[i], dtype), dtype);
        CHECK(same(twin_widen(plain[i], dtype), expected), "%zu of %zu", i, count);
        const float limited = twin_widen(saturated[i], dtype);
        CHECK(!std::isinf(limited), "%zu of %zu", i, count);
        CHECK(std::isinf(expected) || same(limited, expected), "%zu of %zu", i, count);
        CHECK(!std::isinf(expected) || (limited > 0) == (expected > 0), "%zu of %zu", i, count);
      }
    }
}
