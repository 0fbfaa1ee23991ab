#include "codec_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace syncline {

namespace portable { extern const CodecTable codec_table; }
#if defined(__x86_64__)
namespace avx2 { extern const CodecTable codec_table; }
namespace avx512 { extern const CodecTable codec_table; }
#endif

namespace {

constexpr size_t small = 1 << 14;
constexpr size_t sampled_one_in = 64;
constexpr int max_tries = 4;

uint32_t magnitude_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

// A magnitude that about `wanted` of the values reach, and a few more: the sample is taken at an odd stride.
uint32_t guess(const float* values, size_t count, double wanted) {
  std::vector<uint32_t> sample;
  for (size_t i = 0; i < count; i += sampled_one_in + 1) sample.push_back(magnitude_of(values[i]));
  const double expected = wanted / double(count) * double(sample.size());
  const size_t place = size_t(std::min(double(sample.size() - 1), expected + 3 * std::sqrt(expected) + 2));
  std::nth_element(sample.begin(), sample.begin() + long(place), sample.end(), std::greater<>());
  return sample[place];
}

// Positions that hold all of the largest, ascending, and as few others as a guess allows.
std::vector<uint32_t> candidates(const float* values, size_t count, size_t wanted) {
  std::vector<uint32_t> found;
  if (count > small && wanted < count / 4) {
    double aim = double(wanted);
    for (int attempt = 0; attempt < max_tries; ++attempt) {
      found.resize(std::min(count, 3 * wanted + 4096));
      found.resize(codec_kernels().collect(found.data(), found.size(), values, count, guess(values, count, aim)));
      const bool full = found.size() >= std::min(count, 3 * wanted + 4096) - 32;
      if (found.size() >= wanted && !full) return found;
      aim *= full ? 0.7 : 1.5;
    }
  }
  found.resize(count);
  for (size_t i = 0; i < count; ++i) found[i] = uint32_t(i);
  return found;
}

}  // namespace

const CodecTable* const* codec_tables(int* num_tables) {
  static const CodecTable* const all[] = {
      &portable::codec_table,
#if defined(__x86_64__)
      &avx2::codec_table, &avx512::codec_table,
#endif
  };
  kernel_tables(num_tables);
  return all;
}

const CodecTable& codec_kernels() {
  int num_tables = 0;
  const CodecTable* const* tables = codec_tables(&num_tables);
  static const CodecTable& best = *tables[num_tables - 1];
  return best;
}

void select_largest(int64_t* positions, const float* values, size_t count, size_t wanted) {
  if (wanted == 0) return;
  const std::vector<uint32_t> some = candidates(values, count, wanted);
  std::vector<uint32_t> sizes(some.size());
  for (size_t i = 0; i < some.size(); ++i) sizes[i] = magnitude_of(values[some[i]]);
  std::nth_element(sizes.begin(), sizes.begin() + long(wanted - 1), sizes.end(), std::greater<>());
  const uint32_t least = sizes[wanted - 1];
  size_t equal = wanted;  // how many of the smallest chosen size there is room for
  for (size_t i = 0; i < wanted; ++i) equal -= sizes[i] > least;
  size_t chosen = 0;
  for (const uint32_t position : some) {
    const uint32_t size = magnitude_of(values[position]);
    if (size < least || (size == least && equal == 0)) continue;
    equal -= size == least;
    positions[chosen++] = position;
  }
}

}  // namespace syncline
