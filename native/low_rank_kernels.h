// The kernels of PowerSGD: products of a matrix with thin ones, in few passes over the matrix.
//
// Thin matrices are given by columns: `factors` rows, each as long as the matrix is wide or high. Every sum has one
// order, whatever the processor and the width of its vectors, so all ranks get the same bits from the same numbers.
#pragma once

#include <cstddef>

namespace syncline {

// A matrix of `rows` x `columns`, row by row.
struct MatrixSize {
  size_t rows, columns;
};

struct LowRankTable {
  // left = matrix x right.
  void (*times_right)(float* left, const float* matrix, MatrixSize, const float* right, size_t factors);

  // right = matrix' x left.
  void (*times_left)(float* right, const float* matrix, MatrixSize, const float* left, size_t factors);

  // matrix -= left x right'.
  void (*subtract_product)(float* matrix, MatrixSize, const float* left, const float* right, size_t factors);

  // out = left x right'.
  void (*write_product)(float* out, MatrixSize, const float* left, const float* right, size_t factors);

  // Gram-Schmidt, twice for exactness, row by row in double precision; a row of nothing stays nothing.
  // `scratch` has room for a row. Whether none was nothing.
  bool (*orthonormalize)(float* rows, size_t factors, size_t length, double* scratch);
};

const LowRankTable& low_rank_kernels();                         // the best that this processor can run
const LowRankTable* const* low_rank_tables(int* num_tables);    // all that it can run; the first is portable

}  // namespace syncline
