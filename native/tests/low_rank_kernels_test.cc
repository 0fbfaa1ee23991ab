#include "low_rank_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "halves.h"
#include "harness.h"
#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

using Floats = std::vector<float>;

Floats noise(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// What every table makes is held against `wanted`, and has the bits of what the first one makes.
void check_tables(const std::function<Floats(const LowRankTable&)>& make, const std::vector<double>& wanted, double tolerance) {
  int num_tables = 0;
  const LowRankTable* const* tables = low_rank_tables(&num_tables);
  const Floats first = make(*tables[0]);
  CHECK(first.size() == wanted.size());
  for (size_t i = 0; i < first.size(); ++i)
    CHECK(std::fabs(first[i] - wanted[i]) <= tolerance * std::max(1.0, std::fabs(wanted[i])), "%zu: %g, not %g", i, first[i], wanted[i]);
  for (int k = 1; k < num_tables; ++k) CHECK(same_bits(first, make(*tables[k])), "table %d", k);
}

struct Case {
  MatrixSize size;
  size_t factors;
  Floats matrix = noise(size.rows * size.columns, 1), left = noise(factors * size.rows, 2), right = noise(factors * size.columns, 3);

  double product(size_t row, size_t column) const {
    double sum = 0;
    for (size_t k = 0; k < factors; ++k) sum += double(left[k * size.rows + row]) * right[k * size.columns + column];
    return sum;
  }
};

// The last one is large enough to be written past the cache.
void for_each_case(const std::function<void(const Case&)>& body) {
  for (const MatrixSize size : {MatrixSize{1, 1}, {0, 3}, {3, 0}, {4, 8}, {5, 33}, {7, 15}, {40, 17}, {9, 1000}})
    for (const size_t factors : {1, 2, 3, 4, 5, 8, 9}) body(Case{size, factors});
  body(Case{{1027, 1031}, 2});
}

}  // namespace

TEST(a_matrix_times_its_right_factors) {
  for_each_case([](const Case& c) {
    std::vector<double> wanted(c.factors * c.size.rows);
    for (size_t k = 0; k < c.factors; ++k)
      for (size_t row = 0; row < c.size.rows; ++row)
        for (size_t i = 0; i < c.size.columns; ++i)
          wanted[k * c.size.rows + row] += double(c.matrix[row * c.size.columns + i]) * c.right[k * c.size.columns + i];
    check_tables([&](const LowRankTable& table) {
      Floats left(wanted.size(), NAN);
      table.times_right(left.data(), c.matrix.data(), c.size, c.right.data(), c.factors);
      return left;
    }, wanted, 1e-4);
  });
}

TEST(a_matrix_times_its_left_factors) {
  for_each_case([](const Case& c) {
    std::vector<double> wanted(c.factors * c.size.columns);
    for (size_t k = 0; k < c.factors; ++k)
      for (size_t row = 0; row < c.size.rows; ++row)
        for (size_t i = 0; i < c.size.columns; ++i)
          wanted[k * c.size.columns + i] += double(c.matrix[row * c.size.columns + i]) * c.left[k * c.size.rows + row];
    check_tables([&](const LowRankTable& table) {
      Floats right(wanted.size(), NAN);
      table.times_left(right.data(), c.matrix.data(), c.size, c.left.data(), c.factors);
      return right;
    }, wanted, 1e-4);
  });
}

TEST(products_of_factors_are_written_and_subtracted) {
  for_each_case([](const Case& c) {
    std::vector<double> wanted(c.matrix.size()), rest(c.matrix.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      wanted[i] = c.product(i / c.size.columns, i % c.size.columns);
      rest[i] = c.matrix[i] - wanted[i];
    }
    for (const size_t shift : {0, 1, 5})
      check_tables([&](const LowRankTable& table) {
        Floats out(shift + wanted.size() + 1, NAN);
        table.write_product(out.data() + shift, c.size, c.left.data(), c.right.data(), c.factors);
        CHECK(std::isnan(out.back()) && (shift == 0 || std::isnan(out[shift - 1])));
        return Floats(out.begin() + long(shift), out.end() - 1);
      }, wanted, 1e-5);
    check_tables([&](const LowRankTable& table) {
      Floats matrix = c.matrix;
      table.subtract_product(matrix.data(), c.size, c.left.data(), c.right.data(), c.factors);
      return matrix;
    }, rest, 1e-5);
  });
}

TEST(rows_become_orthonormal_and_those_of_nothing_stay_nothing) {
  int num_tables = 0;
  const LowRankTable* const* tables = low_rank_tables(&num_tables);
  for (const size_t length : {9, 100, 1003}) {
    constexpr size_t factors = 6;
    Floats first;
    for (int table = 0; table < num_tables; ++table) {
      Floats rows = noise(factors * length, 4);
      for (size_t i = 0; i < length; ++i) {
        rows[1 * length + i] = rows[i] + 1e-3f * rows[1 * length + i];  // nearly the first
        rows[2 * length + i] = 0;
        rows[4 * length + i] = -3 * rows[i];  // along the first
        rows[5 * length + i] *= 1e-30f;
      }
      std::vector<double> scratch(length);
      CHECK(!tables[table]->orthonormalize(rows.data(), factors, length, scratch.data()));
      CHECK(tables[table]->orthonormalize(rows.data(), 2, length, scratch.data()));
      for (size_t a = 0; a < factors; ++a)
        for (size_t b = 0; b <= a; ++b) {
          double dot = 0;
          for (size_t i = 0; i < length; ++i) dot += double(rows[a * length + i]) * rows[b * length + i];
          const bool unit = a == b && a != 2 && a != 4;
          CHECK(std::fabs(dot - (unit ? 1 : 0)) < 2e-7, "%zu %zu: %g", a, b, dot);
        }
      if (table == 0) first = rows;
      CHECK(same_bits(first, rows));
    }
  }
}

TEST(saturated_halves_are_those_of_the_twin_or_the_largest) {
  for (const DataType dtype : {DataType::float16, DataType::bfloat16})
    for (const size_t count : {0, 1, 255, 1023, 1024, 1025, 5000}) {
      std::vector<float> values(count);
      std::vector<uint16_t> halves(count + 1, 0xabcd);
      fill_wild(values.data(), count, DataType::float32, count);
      narrow_saturated(halves.data(), values.data(), count, dtype);
      CHECK(halves[count] == 0xabcd);
      const float most = dtype == DataType::float16 ? 65504.0f : 0x1.fep127f;
      for (size_t i = 0; i < count; ++i) {
        const float wanted = twin_widen(twin_narrow(std::isnan(values[i]) ? values[i] : std::clamp(values[i], -most, most), dtype), dtype);
        const float found = twin_widen(halves[i], dtype);
        CHECK(std::isnan(wanted) ? std::isnan(found) : found == wanted, "%zu of %zu: %g, not %g", i, count, found, wanted);
      }
    }
}

TEST(large_buffers_of_halves_are_those_of_the_twin) {
  for (const DataType dtype : {DataType::float16, DataType::bfloat16})
    for (const size_t count : {0, 1, 255, 1023, 1024, 1025, 5000}) {
      std::vector<float> values(count), back(count + 1, -7.0f);
      std::vector<uint16_t> halves(count + 1, 0xabcd);
      fill_wild(values.data(), count, DataType::float32, count);
      narrow_buffer(halves.data(), values.data(), count, dtype);
      widen_buffer(back.data(), halves.data(), count, dtype);
      CHECK(halves[count] == 0xabcd && back[count] == -7.0f);
      for (size_t i = 0; i < count; ++i) {
        const float wanted = twin_widen(twin_narrow(values[i], dtype), dtype);
        CHECK(std::isnan(wanted) ? std::isnan(back[i]) : back[i] == wanted, "%zu of %zu: %g, not %g", i, count, back[i], wanted);
      }
    }
}
