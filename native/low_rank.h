// Many matrices in one buffer of values, and their thin factors, which lie one matrix after the other:
//
//     lefts     factors x rows of the first | of the second | ...
//     rights    factors x columns of the first | of the second | ...
#pragma once

#include <cstddef>
#include <vector>

#include "low_rank_kernels.h"

namespace syncline {

struct ThinMatrix {
  size_t at;  // where it begins in the values
  MatrixSize size;
  size_t factors;
};

using ThinMatrices = std::vector<ThinMatrix>;

// lefts = each matrix x its right factors.
void times_rights(const LowRankTable&, float* lefts, const float* values, const ThinMatrices&, const float* rights);

// rights = each matrix' x its left factors; what both say is taken from the matrix while that is in the cache.
void take_rights(const LowRankTable&, float* rights, float* values, const ThinMatrices&, const float* lefts);

// Each matrix = its left x its right factors.
void write_products(const LowRankTable&, float* out, const ThinMatrices&, const float* lefts, const float* rights);

// Rows of so many factors and such a length, one after the other; whether none of them was nothing.
struct Factors {
  size_t count, length;
};
bool orthonormalize_all(const LowRankTable&, float* rows, const std::vector<Factors>&);

}  // namespace syncline
