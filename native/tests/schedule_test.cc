#include "schedule.h"

#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

struct Program {
  std::vector<Row> rows;
  void add(Opcode opcode, int64_t a = 0, int64_t b = 0, int64_t c = 0) { rows.push_back({int64_t(opcode), a, b, c, 0}); }
};

int64_t cut(uint64_t count, int world, int k) { return int64_t(count * uint64_t(k) / uint64_t(world)); }

// Ring, by hand: world - 1 steps of adding the left neighbour's chunk, then as many of copying.
Program ring(int rank, int world, uint64_t count) {
  Program program;
  const int left = (rank + world - 1) % world;
  const auto chunk = [&](int step) { return ((rank - step) % world + world) % world; };
  int done = 0;
  for (int step = 0; step < world - 1; ++step) {
    const int c = chunk(step + 1);
    program.add(Opcode::wait, left, done);
    program.add(Opcode::pull_add, left, cut(count, world, c), cut(count, world, c + 1));
    if (step < world - 2) program.add(Opcode::signal, ++done);
  }
  const int owned = (rank + 1) % world;
  program.add(Opcode::finish, cut(count, world, owned), cut(count, world, owned + 1));
  program.add(Opcode::signal, ++done);
  for (int step = 0; step < world - 1; ++step) {
    const int c = chunk(step);
    program.add(Opcode::wait, left, done);
    program.add(Opcode::pull_copy, left, cut(count, world, c), cut(count, world, c + 1));
    program.add(Opcode::signal, ++done);
  }
  return program;
}

// Direct: every rank folds its own chunk over all ranks, then copies the chunks of the others.
Program direct(int rank, int world, uint64_t count) {
  Program program;
  const int64_t all = world == 64 ? -1 : (int64_t(1) << world) - 1;
  program.add(Opcode::fold, cut(count, world, rank), cut(count, world, rank + 1), all);
  program.add(Opcode::finish, cut(count, world, rank), cut(count, world, rank + 1));
  program.add(Opcode::signal, 1);
  for (int peer = 0; peer < world; ++peer) {
    program.add(Opcode::wait, peer, 1);
    program.add(Opcode::pull_copy, peer, cut(count, world, peer), cut(count, world, peer + 1));
  }
  return program;
}

void check_direct(Group& group, uint64_t count, DataType dtype, ReduceOp op, bool shared, uint64_t turn) {
  const size_t size = size_of(dtype);
  std::vector<std::vector<std::byte>> inputs;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < group.world(); ++rank) {
    inputs.emplace_back(count * size + 1);
    fill(inputs.back().data(), count, dtype, uint64_t(rank) * 31 + turn);
    pointers.push_back(inputs.back().data());
  }
  Memory memory(group, shared, count * size);
  std::memcpy(memory.data(), pointers[group.rank()], count * size);
  const Program program = direct(group.rank(), group.world(), count);
  group.run_schedule(memory.data(), count, dtype, op, program.rows.data(), program.rows.size(), "direct");
  std::vector<std::byte> expected(count * size + 1);
  twin_fold(expected.data(), pointers, count, dtype, op);
  CHECK(first_difference(memory.data(), expected.data(), count, dtype) < 0, "%s %s[%lu]", name_of(op), name_of(dtype),
        (unsigned long)count);
}

void check_ring(Group& group, uint64_t count, bool shared) {
  Memory memory(group, shared, count * 8);
  auto* values = static_cast<int64_t*>(memory.data());
  for (uint64_t i = 0; i < count; ++i) values[i] = int64_t(i) * group.world() + group.rank();
  const Program program = ring(group.rank(), group.world(), count);
  group.run_schedule(values, count, DataType::int64, ReduceOp::sum, program.rows.data(), program.rows.size(), "ring");
  const int64_t w = group.world();
  for (uint64_t i = 0; i < count; ++i) CHECK(values[i] == int64_t(i) * w * w + w * (w - 1) / 2, "element %lu", (unsigned long)i);
}

}  // namespace

TEST(a_direct_schedule_equals_the_twin) {
  for (const int world : {1, 2, 3, 5, 8})
    run_ranks(world, [](Group& group) {
      uint64_t turn = 0;
      for (const uint64_t count : {0, 1, 7, 9, 10'007})
        for (const DataType dtype : reducible)
          for (const ReduceOp op : reductions)
            for (const bool shared : {true, false}) {
              ++turn;
              check_direct(group, count, dtype, op, shared != (turn % 5 == group.rank() % 3u), turn);
            }
    });
}

TEST(a_ring_schedule_has_the_closed_form) {
  for (const int world : {2, 3, 4, 7, 8})
    run_ranks(world, [](Group& group) {
      for (const uint64_t count : {0, 1, 5, 8, 1000, 100'003})
        for (const bool shared : {true, false}) check_ring(group, count, shared);
    });
}

TEST(a_ring_of_half_precision_rounds_once) {
  run_ranks(4, [](Group& group) {
    // 1 + 3 * 2^-11: rounding after every addition would lose all of the small ones.
    std::vector<uint16_t> values(4096, group.rank() == 0 ? 0x3c00 : 0x1000);
    const Program program = ring(group.rank(), 4, values.size());
    group.run_schedule(values.data(), values.size(), DataType::float16, ReduceOp::sum, program.rows.data(), program.rows.size());
    for (const uint16_t value : values) CHECK(value == 0x3c02, "%x", value);
  });
}

TEST(a_wrong_program_is_refused_before_anything_is_sent) {
  run_ranks(2, [](Group& group) {
    std::vector<float> data(10);
    const Row wrong[] = {{0, 2, 1, 0, 0},  {0, -1, 1, 0, 0}, {1, 0, 5, 11, 0}, {1, 0, 6, 5, 0}, {2, 0, -1, 5, 0},
                         {3, 0, 5, 4, 0},  {3, 0, 5, 0, 0},  {4, 0, 11, 0, 0}, {5, -1, 0, 0, 0}, {6, 0, 0, 0, 0},
                         {-1, 0, 0, 0, 0}};
    for (const Row& row : wrong) {
      bool refused = false;
      try {
        group.run_schedule(data.data(), 10, DataType::float32, ReduceOp::sum, &row, 1);
      } catch (const std::invalid_argument&) {
        refused = true;
      }
      CHECK(refused, "opcode %ld", long(row.opcode));
    }
    check_ring(group, 100, true);
  });
}
