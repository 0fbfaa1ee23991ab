#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

uint64_t seed_of(int rank, uint64_t turn) { return uint64_t(rank) * 7919 + turn * 104729 + 1; }

// What all ranks must end with, computed by the twin from everybody's inputs.
std::vector<std::byte> expected_of(int world, uint64_t count, DataType dtype, ReduceOp op, uint64_t turn) {
  const size_t size = size_of(dtype);
  std::vector<std::vector<std::byte>> memory;
  std::vector<const void*> inputs;
  for (int rank = 0; rank < world; ++rank) {
    memory.emplace_back(count * size + 1);
    fill(memory.back().data(), count, dtype, seed_of(rank, turn));
    inputs.push_back(memory.back().data());
  }
  std::vector<std::byte> out(count * size + 1);
  twin_fold(out.data(), inputs, count, dtype, op);
  return out;
}

enum class Where { shared, separate, mixed };

bool is_shared(Where where, int rank) { return where == Where::shared || (where == Where::mixed && rank % 2 == 0); }

void check_all_reduce(Group& group, uint64_t count, DataType dtype, ReduceOp op, Where where, uint64_t turn,
                      const std::vector<std::byte>* known = nullptr) {
  const size_t size = size_of(dtype);
  Memory memory(group, is_shared(where, group.rank()), count * size, size * (turn % 3));
  fill(memory.data(), count, dtype, seed_of(group.rank(), turn));
  group.all_reduce(memory.data(), count, dtype, op);
  const auto expected = known ? *known : expected_of(group.world(), count, dtype, op, turn);
  const int64_t wrong = first_difference(memory.data(), expected.data(), count, dtype);
  CHECK(wrong < 0, "element %ld of %lu, %s %s, world %d, where %d", long(wrong), (unsigned long)count, name_of(op),
        name_of(dtype), group.world(), int(where));
}

std::vector<uint64_t> awkward_counts(int world) {
  std::vector<uint64_t> counts = {0, 1, 7, uint64_t(world - 1), uint64_t(world + 1), 4099, 65537};
  return counts;
}

}  // namespace

TEST(all_reduce_equals_its_twin) {
  for (const int world : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
    if (under_thread_sanitizer && world > 5) continue;
    run_ranks(world, [](Group& group) {
      uint64_t turn = 0;
      for (const uint64_t count : awkward_counts(group.world()))
        for (const DataType dtype : reducible)
          for (const ReduceOp op : reductions)
            for (const Where where : {Where::shared, Where::separate, Where::mixed}) {
              if (count > 60'000 && (group.world() > 4 ? dtype != DataType::float16 : op == ReduceOp::max)) continue;
              check_all_reduce(group, count, dtype, op, where, ++turn);
            }
    });
  }
}

TEST(all_reduce_of_a_million_equals_its_twin) {
  for (const int world : {2, 3, 8}) {
    if (under_thread_sanitizer && world > 2) continue;
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::int64}) {
      const auto expected = expected_of(world, 1'000'003, dtype, ReduceOp::mean, 1);
      run_ranks(world, [&](Group& group) {
        for (const Where where : {Where::shared, Where::separate, Where::mixed})
          check_all_reduce(group, 1'000'003, dtype, ReduceOp::mean, where, 1, &expected);
      });
    }
  }
}

TEST(ten_thousand_calls_of_mixed_sizes) {
  const int calls = under_thread_sanitizer || under_address_sanitizer ? 1000 : 10'000;
  for (const int world : {2, 4}) {
    run_ranks(world, [calls](Group& group) {
      Random random(42);  // the same on all ranks
      const uint64_t largest = 300'000;
      Memory shared(group, true, largest * 8), separate(group, false, largest * 8);
      for (int call = 0; call < calls; ++call) {
        const uint64_t roll = random.below(100);
        const uint64_t count = roll < 70 ? random.below(300) : roll < 95 ? random.below(20'000) : random.below(largest);
        const Where where = Where(random.below(3));
        Memory& memory = is_shared(where, group.rank()) ? shared : separate;
        auto* values = static_cast<int64_t*>(memory.data());
        for (uint64_t i = 0; i < count; ++i) values[i] = int64_t(i) * group.world() + group.rank() + call;
        group.all_reduce(values, count, DataType::int64, ReduceOp::sum);
        const int64_t w = group.world();
        for (uint64_t i = 0; i < count; ++i)
          CHECK(values[i] == int64_t(i) * w * w + w * (w - 1) / 2 + w * call, "call %d element %lu", call, (unsigned long)i);
      }
    });
  }
}

TEST(two_groups_at_once) {
  const Place other = Place::fresh();
  run_ranks(3, [&](Group& group) {
    // The second group counts its ranks backwards.
    Group second(other.address, 2 - group.rank(), 3, other.nonce, quick_settings());
    for (uint64_t turn = 0; turn < 50; ++turn) {
      check_all_reduce(group, 1000 + turn * 997, DataType::float32, ReduceOp::sum, Where(turn % 3), turn);
      check_all_reduce(second, 100 + turn * 1997, DataType::float16, ReduceOp::mean, Where(turn % 2), turn + 100);
    }
    second.close();
  });
}

TEST(sixty_four_ranks) {
  if (under_thread_sanitizer) return;
  Settings settings = quick_settings();
  settings.arena_bytes = 16 << 20;
  run_ranks(64, [](Group& group) {
    for (uint64_t turn = 0; turn < 3; ++turn) {
      check_all_reduce(group, 17, DataType::float32, ReduceOp::sum, Where::shared, turn);
      check_all_reduce(group, 20'011, DataType::float32, ReduceOp::mean, Where(turn), turn);
    }
  }, settings);
}
