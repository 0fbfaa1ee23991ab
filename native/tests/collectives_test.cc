#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

// Element i of block b that rank r gives: all different.
int64_t given(int rank, int block, uint64_t i, uint64_t turn) {
  return int64_t(i) * 1'000'000 + rank * 1000 + block * 10 + int64_t(turn);
}

std::vector<uint64_t> counts() { return {0, 1, 3, 1000, 70'001}; }

template <class Body>
void for_each_case(int world, const Body& body) {
  run_ranks(world, [&](Group& group) {
    uint64_t turn = 0;
    for (const uint64_t count : counts())
      for (const int where : {0, 1, 2}) {
        const bool shared = where == 0 || (where == 1 && group.rank() % 2 == 0);
        body(group, count, shared, ++turn);
      }
  });
}

constexpr int worlds[] = {1, 2, 3, 5, 8};

void fill_blocks(int64_t* data, int rank, int blocks, uint64_t count, uint64_t turn) {
  for (int b = 0; b < blocks; ++b)
    for (uint64_t i = 0; i < count; ++i) data[uint64_t(b) * count + i] = given(rank, b, i, turn);
}

}  // namespace

TEST(reduce_scatter_gives_each_rank_its_block) {
  for (const int world : worlds)
    for_each_case(world, [](Group& group, uint64_t count, bool shared, uint64_t turn) {
      const int world = group.world();
      Memory input(group, shared, world * count * 8), output(group, !shared, count * 8);
      auto* in = static_cast<int64_t*>(input.data());
      auto* out = static_cast<int64_t*>(output.data());
      fill_blocks(in, group.rank(), world, count, turn);
      group.reduce_scatter(in, out, count, DataType::int64, ReduceOp::sum);
      for (uint64_t i = 0; i < count; ++i) {
        int64_t expected = 0;
        for (int rank = 0; rank < world; ++rank) expected += given(rank, group.rank(), i, turn);
        CHECK(out[i] == expected);
      }
    });
}

TEST(all_gather_gives_all_ranks_everything) {
  for (const int world : worlds)
    for_each_case(world, [](Group& group, uint64_t count, bool shared, uint64_t turn) {
      Memory input(group, shared, count * 8), output(group, shared, group.world() * count * 8);
      auto* out = static_cast<int64_t*>(output.data());
      // Every other time in place.
      auto* in = turn % 2 ? static_cast<int64_t*>(input.data()) : out + group.rank() * count;
      fill_blocks(in, group.rank(), 1, count, turn);
      group.all_gather(in, out, count, DataType::int64);
      for (int rank = 0; rank < group.world(); ++rank)
        for (uint64_t i = 0; i < count; ++i) CHECK(out[rank * count + i] == given(rank, 0, i, turn));
    });
}

TEST(broadcast_gives_all_ranks_what_the_root_has) {
  for (const int world : worlds)
    for_each_case(world, [](Group& group, uint64_t count, bool shared, uint64_t turn) {
      const int root = int(turn) % group.world();
      Memory memory(group, shared, count * 8);
      auto* data = static_cast<int64_t*>(memory.data());
      fill_blocks(data, group.rank(), 1, count, turn);
      group.broadcast(data, count, DataType::int64, root);
      for (uint64_t i = 0; i < count; ++i) CHECK(data[i] == given(root, 0, i, turn));
    });
}

TEST(all_to_all_transposes_blocks) {
  for (const int world : worlds)
    for_each_case(world, [](Group& group, uint64_t count, bool shared, uint64_t turn) {
      const int world = group.world();
      Memory input(group, shared, world * count * 8), output(group, false, world * count * 8);
      auto* in = static_cast<int64_t*>(input.data());
      auto* out = static_cast<int64_t*>(output.data());
      fill_blocks(in, group.rank(), world, count, turn);
      group.all_to_all(in, out, count, DataType::int64);
      for (int rank = 0; rank < world; ++rank)
        for (uint64_t i = 0; i < count; ++i) CHECK(out[rank * count + i] == given(rank, group.rank(), i, turn));
    });
}

TEST(bytes_can_be_gathered) {
  run_ranks(3, [](Group& group) {
    std::vector<uint8_t> in(100'001, uint8_t(group.rank() + 1)), out(in.size() * 3);
    group.all_gather(in.data(), out.data(), in.size(), DataType::byte);
    for (int rank = 0; rank < 3; ++rank)
      for (size_t i = 0; i < in.size(); ++i) CHECK(out[rank * in.size() + i] == rank + 1);
  });
}

TEST(nobody_passes_a_barrier_before_all_have_come) {
  run_ranks(4, [](Group& group) {
    for (int turn = 0; turn < 300; ++turn) group.barrier();
    const double start = now_s();
    if (group.rank() == 2) sleep_s(0.3);
    group.barrier();
    CHECK(group.rank() == 2 || now_s() - start > 0.2);
  });
}

TEST(mixed_operations_follow_each_other) {
  run_ranks(3, [](Group& group) {
    Random random(9);
    const uint64_t largest = 120'000;
    Memory shared(group, true, largest * 8 * 3), separate(group, false, largest * 8 * 3), output(group, false, largest * 8 * 3);
    auto* out = static_cast<int64_t*>(output.data());
    for (uint64_t turn = 0; turn < 300; ++turn) {
      const uint64_t count = random.below(3) ? random.below(500) : random.below(largest);
      const bool here = random.below(2) || group.rank() == int(random.below(3));
      auto* in = static_cast<int64_t*>((here ? shared : separate).data());
      const uint64_t kind = random.below(4);
      if (kind == 0) {
        fill_blocks(in, group.rank(), 1, count, turn);
        group.all_reduce(in, count, DataType::int64, ReduceOp::max);
        for (uint64_t i = 0; i < count; ++i) CHECK(in[i] == given(2, 0, i, turn));
      } else if (kind == 1) {
        fill_blocks(in, group.rank(), 1, count, turn);
        group.all_gather(in, out, count, DataType::int64);
        for (uint64_t i = 0; i < count; ++i) CHECK(out[2 * count + i] == given(2, 0, i, turn));
      } else if (kind == 2) {
        fill_blocks(in, group.rank(), 3, count, turn);
        group.all_to_all(in, out, count, DataType::int64);
        for (uint64_t i = 0; i < count; ++i) CHECK(out[count + i] == given(1, group.rank(), i, turn));
      } else {
        fill_blocks(in, group.rank(), 3, count, turn);
        group.reduce_scatter(in, out, count, DataType::int64, ReduceOp::max);
        for (uint64_t i = 0; i < count; ++i) CHECK(out[i] == given(2, group.rank(), i, turn));
      }
    }
  });
}
