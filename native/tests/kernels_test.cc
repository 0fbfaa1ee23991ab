#include "kernels.h"

#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

void check_fold(const KernelTable& table, int world, uint64_t count, DataType dtype, ReduceOp op, uint64_t shift, bool in_place) {
  const size_t size = size_of(dtype);
  std::vector<std::vector<std::byte>> memory;
  std::vector<const void*> inputs;
  for (int k = 0; k < world; ++k) {
    memory.emplace_back((count + shift * (k + 1) + 1) * size);
    fill_wild(memory[k].data() + shift * k * size, count, dtype, uint64_t(k) * 1000 + count);
    inputs.push_back(memory[k].data() + shift * k * size);
  }
  std::vector<std::byte> expected(count * size + 1), fresh(count * size + size);
  twin_fold(expected.data(), inputs, count, dtype, op);
  void* out = in_place ? const_cast<void*>(inputs[world / 2]) : fresh.data();
  const bool finite = table.fold(out, inputs.data(), world, count, dtype, op, op == ReduceOp::mean ? world : 1);
  CHECK(finite == twin_finite(expected.data(), count, dtype), "%lu, %s", (unsigned long)count, name_of(dtype));
  const int64_t wrong = first_difference(out, expected.data(), count, dtype);
  CHECK(wrong < 0, "element %ld of %lu, %s %s of %d", long(wrong), (unsigned long)count, name_of(op), name_of(dtype), world);
}

template <class Body>
void for_each_table(const Body& body) {
  int num_tables = 0;
  const KernelTable* const* tables = kernel_tables(&num_tables);
  for (int k = 0; k < num_tables; ++k) body(*tables[k]);
}

}  // namespace

TEST(fold_equals_its_twin) {
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : reducible)
      for (const ReduceOp op : reductions)
        for (const int world : {1, 2, 3, 4, 5, 7, 8, 9, 16, 64})
          for (const uint64_t count : {0, 1, 7, 15, 33, 1023, 1025, 2500})
            for (const uint64_t shift : {0, 1})
              for (const bool in_place : {false, true}) check_fold(table, world, count, dtype, op, shift, in_place);
  });
}

TEST(one_element_that_is_not_finite_is_noticed_anywhere) {
  constexpr uint64_t count = 2053;
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : floating)
      for (uint64_t at = 0; at < count; at += at < 70 || at > 1980 ? 1 : 61)
        for (const double bad : {double(NAN), double(INFINITY), double(-INFINITY), largest(dtype)}) {
          std::vector<uint64_t> memory[2] = {std::vector<uint64_t>(count), std::vector<uint64_t>(count)};
          const void* inputs[] = {memory[0].data(), memory[1].data()};
          for (auto& each : memory) fill(each.data(), count, dtype, at);
          CHECK(table.fold(memory[0].data(), inputs, 2, count, dtype, ReduceOp::sum, 1));
          for (auto& each : memory) set(each.data(), at, dtype, bad);  // twice the largest number overflows
          CHECK(!table.fold(memory[0].data(), inputs, 2, count, dtype, ReduceOp::sum, 1), "%lu of %s", (unsigned long)at,
                name_of(dtype));
        }
  });
}

TEST(a_division_says_whether_all_is_finite) {
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : {DataType::float32, DataType::float64})
      for (const uint64_t at : {0, 1023, 1024, 2499}) {
        std::vector<double> memory(2500), expected(2500);
        fill(memory.data(), 2500, dtype, at);
        for (uint64_t i = 0; i < 2500; ++i) set(expected.data(), i, dtype, twin_value(memory.data(), i, dtype) / 3);
        std::vector<double> elsewhere(2500);
        CHECK(table.divide(elsewhere.data(), memory.data(), 2500, dtype, 3));
        CHECK(first_difference(elsewhere.data(), expected.data(), 2500, dtype) < 0);
        CHECK(table.divide(memory.data(), memory.data(), 2500, dtype, 3));
        CHECK(first_difference(memory.data(), expected.data(), 2500, dtype) < 0);
        for (const double bad : {double(NAN), double(INFINITY), double(-INFINITY)}) {
          set(memory.data(), at, dtype, bad);
          CHECK(!table.divide(memory.data(), memory.data(), 2500, dtype, 3));
        }
      }
    std::vector<int32_t> whole = {-7, 7, INT32_MIN, 0x7f800000};
    CHECK(table.divide(whole.data(), whole.data(), 4, DataType::int32, 2));
    CHECK(whole[0] == -3 && whole[1] == 3);
  });
}

TEST(what_goes_past_the_cache_goes_where_it_should) {
  for_each_table([](const KernelTable& table) {
    for (const uint64_t from : {0, 1, 3, 64})
      for (const uint64_t to : {0, 1, 5, 63, 64})
        for (const uint64_t bytes : {0, 1, 63, 64, 65, 127, 128, 1000}) {
          std::vector<uint8_t> in(1200), out(1200, 7);
          for (uint64_t i = 0; i < in.size(); ++i) in[i] = uint8_t(i * 31);
          table.copy_past_cache(out.data() + to, in.data() + from, bytes);
          for (uint64_t i = 0; i < out.size(); ++i)
            CHECK(out[i] == (i >= to && i < to + bytes ? in[i - to + from] : 7), "byte %lu of %lu", (unsigned long)i,
                  (unsigned long)bytes);
        }
  });
}

TEST(a_division_past_the_cache_equals_a_plain_one) {
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : {DataType::float32, DataType::float64, DataType::int32})
      for (const uint64_t start : {0, 1, 7, 15})
        for (const uint64_t count : {0, 1, 15, 16, 1023, 1024, 1040, 2500}) {
          std::vector<double> in(2600), out(2600), expected(2600);
          fill(in.data(), count, dtype, start);
          const uint64_t first = start * size_of(dtype);
          std::byte* at = reinterpret_cast<std::byte*>(out.data()) + first;
          const bool finite = table.divide(reinterpret_cast<std::byte*>(expected.data()) + first, in.data(), count, dtype, 3);
          CHECK(table.divide_past_cache(at, in.data(), count, dtype, 3) == finite);
          CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(double)) == 0);
          if (dtype == DataType::int32 || count == 0) continue;
          set(in.data(), count - 1, dtype, NAN);
          CHECK(!table.divide_past_cache(at, in.data(), count, dtype, 3));
        }
  });
}

TEST(half_conversions_past_the_cache_equal_plain_ones) {
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : {DataType::float16, DataType::bfloat16})
      for (const size_t start : {0, 1, 7, 31})
        for (const size_t count : {0, 1, 15, 31, 32, 1023, 1024, 1040, 2500}) {
          std::vector<float> in(2600), wide(2600, -7.0f), expected_wide(2600, -7.0f);
          std::vector<uint16_t> halves(2600, 0xabcd), expected(2600, 0xabcd);
          fill_wild(in.data(), count, DataType::float32, count);
          table.narrow(expected.data() + start, in.data(), count, dtype);
          table.narrow_past_cache(halves.data() + start, in.data(), count, dtype);
          CHECK(halves == expected);
          table.widen(expected_wide.data() + start, halves.data() + start, count, dtype);
          table.widen_past_cache(wide.data() + start, halves.data() + start, count, dtype);
          CHECK(std::memcmp(wide.data(), expected_wide.data(), wide.size() * sizeof(float)) == 0);
        }
  });
}

TEST(half_conversions_equal_their_twins) {
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : {DataType::float16, DataType::bfloat16}) {
      std::vector<uint16_t> all(65536 + 3), back(all.size());
      for (size_t i = 0; i < all.size(); ++i) all[i] = uint16_t(i);
      std::vector<float> wide(all.size());
      table.widen(wide.data(), all.data(), all.size(), dtype);
      for (size_t i = 0; i < all.size(); ++i) {
        const float expected = twin_widen(all[i], dtype);
        CHECK(std::memcmp(&wide[i], &expected, 4) == 0 || (std::isnan(wide[i]) && std::isnan(expected)), "bits %zx", i);
      }
      table.narrow(back.data(), wide.data(), all.size(), dtype);
      CHECK(first_difference(back.data(), all.data(), all.size(), dtype) < 0);
    }
  });
}

TEST(rounding_to_half_equals_its_twin) {
  for_each_table([](const KernelTable& table) {
    for (const DataType dtype : {DataType::float16, DataType::bfloat16}) {
      std::vector<float> wide(200'003);
      Random random(5);
      for (float& value : wide) {
        // Near the range of float16 as often as anywhere, ties included.
        uint32_t bits = uint32_t(random.next());
        if (random.below(2)) bits = (bits & 0x80001fff) | uint32_t(0x30000000 + random.below(0x18000000));
        if (random.below(4) == 0) bits = (bits & ~0x1fffu) | 0x1000;
        std::memcpy(&value, &bits, 4);
      }
      std::vector<uint16_t> got(wide.size()), expected(wide.size());
      table.narrow(got.data(), wide.data(), wide.size(), dtype);
      for (size_t i = 0; i < wide.size(); ++i) expected[i] = twin_narrow(wide[i], dtype);
      const int64_t wrong = first_difference(got.data(), expected.data(), wide.size(), dtype);
      CHECK(wrong < 0, "%a became %x, not %x", wide[wrong], got[wrong], expected[wrong]);
    }
  });
}

TEST(maximum_keeps_nan_wherever_it_is) {
  for_each_table([](const KernelTable& table) {
    for (int where = 0; where < 3; ++where) {
      std::vector<std::vector<float>> values(3, std::vector<float>(37, 1.0f));
      values[where][20] = NAN;
      const void* inputs[] = {values[0].data(), values[1].data(), values[2].data()};
      std::vector<float> out(37);
      table.fold(out.data(), inputs, 3, 37, DataType::float32, ReduceOp::max, 1);
      CHECK(std::isnan(out[20]) && out[19] == 1.0f);
    }
  });
}

TEST(an_element_does_not_depend_on_its_position) {
  Random random(3);
  std::vector<std::vector<float>> values(5, std::vector<float>(4096));
  for (auto& row : values)
    for (float& value : row) value = float(random.uniform() - 0.5);
  std::vector<const void*> inputs;
  for (auto& row : values) inputs.push_back(row.data());
  std::vector<float> whole(4096), part(4096);
  fold(whole.data(), inputs.data(), 5, 4096, DataType::float32, ReduceOp::mean);
  for (size_t first = 0; first < 4096;) {
    const size_t count = std::min<size_t>(1 + random.below(50), 4096 - first);
    std::vector<const void*> parts;
    for (auto& row : values) parts.push_back(row.data() + first);
    fold(part.data() + first, parts.data(), 5, count, DataType::float32, ReduceOp::mean);
    first += count;
  }
  CHECK(std::memcmp(whole.data(), part.data(), sizeof(float) * 4096) == 0);
}
