#include "selection.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "harness.h"

using namespace syncline;
using namespace syncline::test;

namespace {

std::vector<float> values_of(size_t count, bool ties) {
  Random random(count);
  std::vector<float> values(count);
  for (float& value : values) value = float(std::log(random.uniform() + 1e-9) * (random.below(2) ? 1 : -1));
  if (ties)
    for (float& value : values) value = std::round(value);
  return values;
}

// As the definition has it: sorted by magnitude, equal ones by position.
std::vector<int64_t> sorted_choice(const std::vector<float>& values, size_t rows, size_t columns, size_t wanted) {
  std::vector<int64_t> all;
  for (size_t row = 0; row < rows; ++row) {
    std::vector<int64_t> order(columns);
    for (size_t i = 0; i < columns; ++i) order[i] = int64_t(row * columns + i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::fabs(values[size_t(a)]) > std::fabs(values[size_t(b)]);
    });
    std::sort(order.begin(), order.begin() + long(wanted));
    all.insert(all.end(), order.begin(), order.begin() + long(wanted));
  }
  return all;
}

void check_selection(const std::vector<float>& values, size_t rows, size_t columns, size_t wanted) {
  std::vector<int64_t> chosen(rows * wanted, -1);
  select_largest(chosen.data(), values.data(), rows, columns, wanted);
  CHECK(chosen == sorted_choice(values, rows, columns, wanted), "%zu of %zu, %zu rows", wanted, columns, rows);
}

}  // namespace

TEST(the_largest_are_selected_in_order_and_the_first_of_equal_ones) {
  for (const size_t count : {1ul, 7ul, 100ul, 16384ul, 100'003ul, 300'000ul})
    for (const double keep : {0.001, 0.01, 0.1, 0.5, 1.0})
      for (const bool ties : {false, true})
        check_selection(values_of(count, ties), 1, count, std::max<size_t>(1, size_t(keep * double(count))));
}

TEST(every_row_is_selected_from_whatever_the_row_before_was) {
  for (const size_t columns : {1ul, 64ul, 1000ul, 20'000ul})
    for (const double keep : {0.001, 0.05, 1.0})
      for (const bool ties : {false, true}) {
        const size_t rows = 7;
        auto values = values_of(rows * columns, ties);
        const float scales[rows] = {1.0f, 100.0f, 0.001f, 0.0f, 1.0f, 1.1f, 1e-30f};
        for (size_t i = 0; i < values.size(); ++i) values[i] *= scales[i / columns];
        check_selection(values, rows, columns, std::max<size_t>(1, size_t(keep * double(columns))));
      }
}
