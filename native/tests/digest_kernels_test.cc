#include "digest_kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "harness.h"

using namespace syncline;
using namespace syncline::test;

namespace {

template <class Body>
void for_each_table(const Body& body) {
  int num_tables = 0;
  const DigestTable* const* tables = digest_tables(&num_tables);
  for (int k = 0; k < num_tables; ++k) body(*tables[k]);
}

std::vector<uint8_t> some_bytes(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = uint8_t(random.next() >> 32);
  return bytes;
}

// Byte by byte, word by word.
uint64_t twin(const std::vector<uint8_t>& bytes, uint64_t first) {
  uint64_t sum = 0;
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    for (size_t k = 0; k < 8 && at + k < bytes.size(); ++k) word |= uint64_t(bytes[at + k]) << (8 * k);
    uint64_t x = word + (first + at / 8 + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
    sum += x ^ x >> 33;
  }
  return sum;
}

uint64_t digest_of(const DigestTable& table, const std::vector<uint8_t>& bytes, uint64_t first = 0) {
  const Piece piece{bytes.data(), bytes.size()};
  return digest_pieces(table, &piece, 1, first);
}

// Around words, and around what vectors of all widths take at a time.
const size_t lengths[] = {0, 1, 7, 8, 9, 15, 16, 63, 64, 65, 127, 128, 129, 511, 513, 4096, 4097, 100'003};

}  // namespace

TEST(digests_are_those_of_the_twin_at_any_alignment) {
  for_each_table([](const DigestTable& table) {
    for (const size_t count : lengths)
      for (const size_t shift : {0, 1, 3, 4, 8, 9})
        for (const uint64_t first : {uint64_t(0), uint64_t(12345), ~uint64_t(0) - 3}) {
          const auto bytes = some_bytes(count, count);
          const std::unique_ptr<uint8_t[]> memory(new uint8_t[count + shift]);  // of exactly that length
          if (count) std::memcpy(memory.get() + shift, bytes.data(), count);
          const Piece piece{memory.get() + shift, count};
          CHECK(digest_pieces(table, &piece, 1, first) == twin(bytes, first), "%zu bytes", count);
        }
  });
}

TEST(a_digest_of_pieces_is_that_of_their_words_in_a_row) {
  for_each_table([](const DigestTable& table) {
    std::vector<std::vector<uint8_t>> parts;
    std::vector<Piece> pieces;
    std::vector<uint8_t> whole;
    for (const size_t count : lengths) parts.push_back(some_bytes(count, count + 1));
    for (const auto& part : parts) {
      pieces.push_back({part.data(), part.size()});
      whole.insert(whole.end(), part.begin(), part.end());
      whole.resize((whole.size() + 7) / 8 * 8);
    }
    CHECK(digest_pieces(table, pieces.data(), pieces.size(), 5) == twin(whole, 5));
    CHECK(digest_pieces(table, nullptr, 0, 5) == 0);
  });
}

TEST(every_flip_of_a_bit_changes_the_digest) {
  for_each_table([](const DigestTable& table) {
    for (const bool zero : {true, false}) {
      auto bytes = zero ? std::vector<uint8_t>(203) : some_bytes(203, 1);
      const uint64_t before = digest_of(table, bytes);
      for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        bytes[bit / 8] ^= uint8_t(1 << bit % 8);
        CHECK(digest_of(table, bytes) != before, "bit %zu", bit);
        bytes[bit / 8] ^= uint8_t(1 << bit % 8);
      }
    }
  });
}

TEST(changes_that_sums_and_exclusive_ors_do_not_see_change_the_digest) {
  for_each_table([](const DigestTable& table) {
    const auto bytes = some_bytes(64, 2);
    const uint64_t before = digest_of(table, bytes);
    for (size_t a = 0; a < 8; ++a)
      for (size_t b = a + 1; b < 8; ++b) {
        auto swapped = bytes, negated = bytes;
        std::swap_ranges(swapped.begin() + a * 8, swapped.begin() + a * 8 + 8, swapped.begin() + b * 8);
        negated[a * 8 + 7] ^= 0x80, negated[b * 8 + 7] ^= 0x80;
        CHECK(digest_of(table, swapped) != before);
        CHECK(digest_of(table, negated) != before);
      }
  });
}
