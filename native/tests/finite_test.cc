#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

enum class Where { shared, separate, mixed };

struct Planted {
  int rank;         // in whose input
  uint64_t at;      // in whichever slice that is
  double value;
};

// What every rank hears of a sum that has one bad element, and of the good one that follows.
void check_heard(Group& group, uint64_t count, DataType dtype, Where where, const Planted& planted) {
  const bool shared = where == Where::shared || (where == Where::mixed && group.rank() % 2 == 0);
  Memory memory(group, shared, count * size_of(dtype));
  const Call sum{.kind = Kind::all_reduce, .output = memory.data(), .count = count, .dtype = dtype};
  for (const bool good : {false, true}) {
    fill(memory.data(), count, dtype, uint64_t(group.rank()) + 1);
    if (!good && group.rank() == planted.rank) set(memory.data(), planted.at, dtype, planted.value);
    const auto handle = group.submit(sum);
    handle->wait();
    CHECK(handle->finite() == (good ? Finite::yes : Finite::no), "%s[%lu] at %lu, where %d, world %d", name_of(dtype),
          (unsigned long)count, (unsigned long)planted.at, int(where), group.world());
  }
}

}  // namespace

TEST(every_rank_hears_of_a_bad_element_in_any_slice) {
  for (const int world : {2, 3, 5})
    run_ranks(world, [](Group& group) {
      for (const DataType dtype : floating)
        for (const Where where : {Where::shared, Where::separate, Where::mixed})
          for (const uint64_t count : {50, 5000, 20'011})
            for (int part = 0; part < group.world(); ++part)
              for (const double bad : {double(NAN), double(INFINITY), double(-INFINITY)})
                check_heard(group, count, dtype, where, {part, (2 * part + 1) * count / (2 * group.world()), bad});
    });
}

TEST(a_sum_that_overflows_is_not_finite) {
  run_ranks(3, [](Group& group) {
    for (const DataType dtype : floating)
      for (const uint64_t count : {50, 100'003}) {
        Memory memory(group, true, count * size_of(dtype));
        for (const ReduceOp op : {ReduceOp::max, ReduceOp::sum}) {
          for (uint64_t i = 0; i < count; ++i) set(memory.data(), i, dtype, i == count / 2 ? largest(dtype) : 1.0);
          const auto handle = group.submit(
              {.kind = Kind::all_reduce, .output = memory.data(), .count = count, .dtype = dtype, .op = op});
          handle->wait();
          CHECK(handle->finite() == (op == ReduceOp::max ? Finite::yes : Finite::no));
        }
      }
  });
}

TEST(what_nobody_has_looked_at_is_not_known) {
  run_ranks(1, [](Group& group) {
    std::vector<float> values(10, NAN);
    const auto handle = group.submit({.kind = Kind::all_reduce, .output = values.data(), .count = 10});
    handle->wait();
    CHECK(handle->finite() == Finite::unknown);
  });
  run_ranks(2, [](Group& group) {
    const auto handle = group.submit({.kind = Kind::barrier});
    handle->wait();
    CHECK(handle->finite() == Finite::unknown);
  });
}
