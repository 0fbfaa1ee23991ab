// The choice of the largest values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

// The positions of the `wanted` values of every row that are largest by magnitude, ascending; of equal ones the first. A row
// has fewer than 2^32 values, and positions are counted from the first row on.
void select_largest(int64_t* positions, const float* values, size_t rows, size_t columns, size_t wanted);

}  // namespace syncline
