#include "digest_kernels.h"

#include <cstring>

#include "kernels.h"

namespace syncline {

namespace portable { extern const DigestTable digest_table; }
#if defined(__x86_64__)
namespace avx2 { extern const DigestTable digest_table; }
namespace avx512 { extern const DigestTable digest_table; }
#endif

uint64_t digest_pieces(const DigestTable& table, const Piece* pieces, size_t num_pieces, uint64_t first) {
  uint64_t sum = 0;
  for (const Piece* piece = pieces; piece != pieces + num_pieces; ++piece) {
    const size_t whole = piece->bytes / sizeof(uint64_t), rest = piece->bytes % sizeof(uint64_t);
    sum += table.sum_words(piece->data, whole, first);
    first += whole;
    if (rest == 0) continue;
    uint64_t last = 0;
    std::memcpy(&last, static_cast<const uint8_t*>(piece->data) + whole * sizeof last, rest);
    sum += table.sum_words(&last, 1, first++);
  }
  return sum;
}

const DigestTable* const* digest_tables(int* num_tables) {
  static const DigestTable* const all[] = {
      &portable::digest_table,
#if defined(__x86_64__)
      &avx2::digest_table, &avx512::digest_table,
#endif
  };
  kernel_tables(num_tables);
  return all;
}

const DigestTable& digest_kernels() {
  int num_tables = 0;
  const DigestTable* const* tables = digest_tables(&num_tables);
  static const DigestTable& best = *tables[num_tables - 1];
  return best;
}

}  // namespace syncline
