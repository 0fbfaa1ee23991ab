// The kernel of digests, compiled once per instruction set: a plain loop that the compiler vectorises.
#include <cstring>

#include "digest_kernels.h"

namespace syncline {
namespace SYNCLINE_KERNELS {
namespace {

uint64_t mixed(uint64_t word) {
  word = (word ^ word >> 33) * 0xff51afd7ed558ccd;
  word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53;
  return word ^ word >> 33;
}

uint64_t sum_words(const void* data, size_t count, uint64_t first) {
  constexpr uint64_t step = 0x9e3779b97f4a7c15;
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + i * sizeof word, sizeof word);
    sum += mixed(word + (first + i + 1) * step);
  }
  return sum;
}

}  // namespace

extern const DigestTable digest_table;
const DigestTable digest_table = {sum_words};

}  // namespace SYNCLINE_KERNELS
}  // namespace syncline
