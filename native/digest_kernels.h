// Digests of memory: whether two replicas have the same bits, without sending them.
//
//   sum of mix(word[i] + (first + i + 1) * step), modulo 2^64, over the words of 64 bits; a last short word is zero-padded
//
// `mix` is the finalizer of MurmurHash3, a bijection of 64 bits that no input bit passes through alone, and `step` is odd, so
// every place has a bijection of its own. Hence:
//   - two memories that differ within one word always have different sums;
//   - differences in several words should cancel no more often than random numbers do, with odds of 2^-64; of pairs of
//     random words with the same bit flipped in both, for 13 bits with the sign bits among them, not one of 2^44 did;
//   - additions modulo 2^64 have no order, so all widths of vectors give the same bits, and parts can be added up.
// A digest that keeps fewer bits of the sum, say 32, misses a difference with odds of 2^-32. Nothing here withstands somebody
// who looks for a collision on purpose.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

// A range of memory, of any alignment; it takes up (bytes + 7) / 8 words.
struct Piece {
  const void* data;
  size_t bytes;
};

struct DigestTable {
  // The sum over `count` whole words of which the first has the number `first`.
  uint64_t (*sum_words)(const void* data, size_t count, uint64_t first);
};

// The sum over the words of all pieces, which are numbered from `first` on.
uint64_t digest_pieces(const DigestTable&, const Piece* pieces, size_t num_pieces, uint64_t first);

const DigestTable& digest_kernels();                            // the best that this processor can run
const DigestTable* const* digest_tables(int* num_tables);       // all that it can run; the first is portable

}  // namespace syncline
