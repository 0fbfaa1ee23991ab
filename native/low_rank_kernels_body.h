// The kernels of PowerSGD, compiled once per instruction set, as kernels_body.h is.
//
// The matrix is large and the factors are few, so time goes into reading the matrix. Several rows are read side by
// side: one row at a time is one stream for the processor to fetch ahead, and four get more than twice the bandwidth.
// Where rows are short it cannot tell them from each other, so the next rows are asked for while these are worked on.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "low_rank_kernels.h"
#include "streaming.h"

namespace syncline {
namespace SYNCLINE_KERNELS {
namespace low_rank {
namespace {

#if defined(__AVX2__)
constexpr size_t width = 8;
#else
constexpr size_t width = 4;
#endif
using Vector = float __attribute__((vector_size(width * sizeof(float))));

constexpr size_t lanes = 8;                 // partial sums of a dot product, on every processor
constexpr size_t rows_at_a_time = 4;
constexpr size_t rows_added_at_a_time = 8;  // that are only read
constexpr size_t factors_at_a_time = 2;     // of a dot product: more would not fit into the registers
constexpr size_t line = line_bytes / sizeof(float);  // of a product made at once
constexpr size_t streamed_bytes = 64 << 10;  // products from this size on go past the cache

Vector load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

void store(float* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

// Asks for the same place in as many rows after these; beyond the last row it is a hint that nothing comes of.
template <size_t Rows>
void fetch_next(const float* matrix, size_t columns) {
  for (size_t r = Rows; r < 2 * Rows; ++r) __builtin_prefetch(matrix + r * columns, 0, 2);
}

// A number that the compiler knows, used as any other.
template <size_t Number>
struct Known {
  static constexpr size_t value = Number;
  constexpr operator size_t() const { return Number; }
};

// Calls `body` with the number of factors; the usual ones are known, which unrolls its loops.
template <class Body>
void with_factors(size_t factors, const Body& body) {
  switch (factors) {
    case 1: return body(Known<1>());
    case 2: return body(Known<2>());
    case 4: return body(Known<4>());
    default: return body(factors);
  }
}

// Calls `body` with some rows at a time, and then with one: `body(row, Known<4>())`.
template <size_t AtATime = rows_at_a_time, class Body>
void for_rows(size_t rows, const Body& body) {
  size_t row = 0;
  for (; row + AtATime <= rows; row += AtATime) body(row, Known<AtATime>());
  for (; row < rows; ++row) body(row, Known<1>());
}

float sum_of_lanes(const float* partial) {
  float total = 0;
  for (size_t lane = 0; lane < lanes; ++lane) total += partial[lane];
  return total;
}

// left[k][r] = row r x factor k.
template <size_t Rows, size_t Factors>
void dots(float* left, const float* matrix, MatrixSize size, const float* right) {
  constexpr size_t vectors = lanes / width;
  Vector sums[Rows][Factors][vectors] = {};
  const size_t whole = size.columns / lanes * lanes;
  for (size_t i = 0; i < whole; i += lanes) {
    if (i % line == 0) fetch_next<Rows>(matrix + i, size.columns);
    for (size_t v = 0; v < vectors; ++v)
      for (size_t r = 0; r < Rows; ++r) {
        const Vector some = load(matrix + r * size.columns + i + v * width);
        for (size_t k = 0; k < Factors; ++k) sums[r][k][v] += some * load(right + k * size.columns + i + v * width);
      }
  }
  for (size_t r = 0; r < Rows; ++r)
    for (size_t k = 0; k < Factors; ++k) {
      float partial[lanes];
      std::memcpy(partial, sums[r][k], sizeof partial);
      for (size_t i = whole; i < size.columns; ++i)
        partial[i - whole] += matrix[r * size.columns + i] * right[k * size.columns + i];
      left[k * size.rows + r] = sum_of_lanes(partial);
    }
}

void times_right(float* left, const float* matrix, MatrixSize size, const float* right, size_t factors) {
  for_rows(size.rows, [&](size_t row, auto rows) {
    const float* from = matrix + row * size.columns;
    size_t k = 0;
    for (; k + factors_at_a_time <= factors; k += factors_at_a_time)
      dots<rows.value, factors_at_a_time>(left + k * size.rows + row, from, size, right + k * size.columns);
    for (; k < factors; ++k) dots<rows.value, 1>(left + k * size.rows + row, from, size, right + k * size.columns);
  });
}

// right += these rows, each times its weight: from the first to the last.
template <size_t Rows, class Factors>
void add_rows(float* right, const float* matrix, MatrixSize size, const float* left, Factors factors) {
  const size_t whole = size.columns / width * width;
  for (size_t i = 0; i < whole; i += width) {
    if (i % line == 0) fetch_next<Rows>(matrix + i, size.columns);
    Vector some[Rows];
    for (size_t r = 0; r < Rows; ++r) some[r] = load(matrix + r * size.columns + i);
    for (size_t k = 0; k < factors; ++k) {
      Vector sum = load(right + k * size.columns + i);
      for (size_t r = 0; r < Rows; ++r) sum += left[k * size.rows + r] * some[r];
      store(right + k * size.columns + i, sum);
    }
  }
  for (size_t k = 0; k < factors; ++k)
    for (size_t r = 0; r < Rows; ++r)
      for (size_t i = whole; i < size.columns; ++i)
        right[k * size.columns + i] += left[k * size.rows + r] * matrix[r * size.columns + i];
}

void times_left(float* right, const float* matrix, MatrixSize size, const float* left, size_t factors) {
  for (size_t i = 0; i < factors * size.columns; ++i) right[i] = 0;
  with_factors(factors, [&](auto known) {
    for_rows<rows_added_at_a_time>(size.rows, [&](size_t row, auto rows) {
      add_rows<rows.value>(right, matrix + row * size.columns, size, left + row, known);
    });
  });
}

// One element of left x right': all products add their terms in this order.
float product_at(const float* left, const float* right, MatrixSize size, size_t factors) {
  float sum = 0;
  for (size_t k = 0; k < factors; ++k) sum += left[k * size.rows] * right[k * size.columns];
  return sum;
}

// `Rows` x `Vectors` vectors of left x right'.
template <size_t Rows, size_t Vectors>
struct Product {
  Vector sums[Rows][Vectors] = {};

  template <class Factors>
  Product(const float* left, const float* right, MatrixSize size, Factors factors) {
    for (size_t k = 0; k < factors; ++k)
      for (size_t v = 0; v < Vectors; ++v) {
        const Vector some = load(right + k * size.columns + v * width);
        for (size_t r = 0; r < Rows; ++r) sums[r][v] += left[k * size.rows + r] * some;
      }
  }
};

template <size_t Rows, class Factors>
void subtract_from_rows(float* matrix, MatrixSize size, const float* left, const float* right, Factors factors) {
  constexpr size_t vectors = line / width;
  const size_t whole = size.columns / line * line;
  for (size_t i = 0; i < whole; i += line) {
    fetch_next<Rows>(matrix + i, size.columns);
    const Product<Rows, vectors> product(left, right + i, size, factors);
    for (size_t r = 0; r < Rows; ++r)
      for (size_t v = 0; v < vectors; ++v) {
        float* to = matrix + r * size.columns + i + v * width;
        store(to, load(to) - product.sums[r][v]);
      }
  }
  for (size_t r = 0; r < Rows; ++r)
    for (size_t i = whole; i < size.columns; ++i)
      matrix[r * size.columns + i] -= product_at(left + r, right + i, size, factors);
}

void subtract_product(float* matrix, MatrixSize size, const float* left, const float* right, size_t factors) {
  with_factors(factors, [&](auto known) {
    for_rows(size.rows, [&](size_t row, auto rows) {
      subtract_from_rows<rows.value>(matrix + row * size.columns, size, left + row, right, known);
    });
  });
}

// A row at a time, because rows differ in where their cache lines begin; whole lines, because those are streamed best.
template <class Factors, class Put>
void write_row(float* out, MatrixSize size, const float* left, const float* right, Factors factors, const Put& put) {
  const size_t before_line = up_to_line(out);
  const size_t head = before_line < size.columns ? before_line : size.columns;
  for (size_t i = 0; i < head; ++i) out[i] = product_at(left, right + i, size, factors);
  size_t i = head;
  for (; i + line <= size.columns; i += line) {
    const Product<1, line / width> product(left, right + i, size, factors);
    put(out + i, product.sums[0]);
  }
  for (; i < size.columns; ++i) out[i] = product_at(left, right + i, size, factors);
}

void write_product(float* out, MatrixSize size, const float* left, const float* right, size_t factors) {
  const auto write = [&](const auto& put) {
    with_factors(factors, [&](auto known) {
      for (size_t row = 0; row < size.rows; ++row)
        write_row(out + row * size.columns, size, left + row, right, known, put);
    });
  };
  if (size.rows * size.columns * sizeof(float) < streamed_bytes) {
    write([](float* to, const Vector* from) { std::memcpy(to, from, line_bytes); });
  } else {
    write([](float* to, const Vector* from) { stream_line(to, from); });
    finish_streaming();
  }
}

template <class Number>
double dot(const Number* a, const double* b, size_t length) {
  double sums[lanes] = {};
  size_t i = 0;
  for (; i + lanes <= length; i += lanes)
    for (size_t k = 0; k < lanes; ++k) sums[k] += double(a[i + k]) * b[i + k];
  for (size_t k = 0; i < length; ++i, ++k) sums[k] += double(a[i]) * b[i];
  double total = 0;
  for (size_t k = 0; k < lanes; ++k) total += sums[k];
  return total;
}

// Takes what lies along the rows before it out of `rest`.
void remove_along(double* rest, const float* rows, size_t num_rows, size_t length) {
  for (size_t k = 0; k < num_rows; ++k) {
    const float* other = rows + k * length;
    const double weight = dot(other, rest, length);
    for (size_t i = 0; i < length; ++i) rest[i] -= weight * double(other[i]);
  }
}

bool orthonormalize(float* rows, size_t factors, size_t length, double* scratch) {
  bool are_something = true;
  for (size_t k = 0; k < factors; ++k) {
    float* row = rows + k * length;
    for (size_t i = 0; i < length; ++i) scratch[i] = double(row[i]);
    const double before = std::sqrt(dot(scratch, scratch, length));
    for (int pass = 0; pass < 2; ++pass) remove_along(scratch, rows, k, length);
    const double after = std::sqrt(dot(scratch, scratch, length));
    const bool is_something = after > 1e-6 * before;
    for (size_t i = 0; i < length; ++i) row[i] = is_something ? float(scratch[i] / after) : 0.0f;
    are_something &= is_something;
  }
  return are_something;
}

}  // namespace
}  // namespace low_rank

extern const LowRankTable low_rank_table;
const LowRankTable low_rank_table = {low_rank::times_right, low_rank::times_left, low_rank::subtract_product,
                                     low_rank::write_product, low_rank::orthonormalize};

}  // namespace SYNCLINE_KERNELS
}  // namespace syncline
