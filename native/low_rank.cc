#include "low_rank.h"

#include <algorithm>

namespace syncline {

void times_rights(const LowRankTable& table, float* lefts, const float* values, const ThinMatrices& matrices,
                  const float* rights) {
  for (const auto& [at, size, factors] : matrices) {
    table.times_right(lefts, values + at, size, rights, factors);
    lefts += factors * size.rows;
    rights += factors * size.columns;
  }
}

void take_rights(const LowRankTable& table, float* rights, float* values, const ThinMatrices& matrices,
                 const float* lefts) {
  for (const auto& [at, size, factors] : matrices) {
    table.times_left(rights, values + at, size, lefts, factors);
    table.subtract_product(values + at, size, lefts, rights, factors);
    lefts += factors * size.rows;
    rights += factors * size.columns;
  }
}

void write_products(const LowRankTable& table, float* out, const ThinMatrices& matrices, const float* lefts,
                    const float* rights) {
  for (const auto& [at, size, factors] : matrices) {
    table.write_product(out + at, size, lefts, rights, factors);
    lefts += factors * size.rows;
    rights += factors * size.columns;
  }
}

bool orthonormalize_all(const LowRankTable& table, float* rows, const std::vector<Factors>& all) {
  size_t longest = 0;
  for (const Factors& factors : all) longest = std::max(longest, factors.length);
  std::vector<double> scratch(longest);
  bool are_something = true;
  for (const Factors& factors : all) {
    are_something &= table.orthonormalize(rows, factors.count, factors.length, scratch.data());
    rows += factors.count * factors.length;
  }
  return are_something;
}

}  // namespace syncline
