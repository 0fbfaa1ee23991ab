#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

// Rank `odd` makes another call than the rest; all must raise Desync, name that rank and quote both sides.
void check_desync(int world, int odd, const Call& usual, const Call& other, const std::vector<std::string>& quotes) {
  run_ranks(world, [&](Group& group) {
    Memory memory(group, true, 1 << 20), second(group, true, 1 << 20);
    for (int turn = 0; turn < 5; ++turn) group.barrier();
    Call call = group.rank() == odd ? other : usual;
    call.output = memory.data();
    call.input = second.data();
    std::string text;
    int culprit = -1;
    try {
      group.run(call);
    } catch (const Desync& error) {
      text = error.what();
      culprit = error.rank;
    }
    CHECK(culprit == odd, "%d: %s", culprit, text.c_str());
    for (const std::string& quote : quotes) CHECK(text.find(quote) != std::string::npos, "%s: %s", quote.c_str(), text.c_str());
    // Nothing was done, and the group goes on: with every kind of memory, twice, so that both slots are used again.
    for (const bool shared : {true, false, true}) {
      Memory later(group, shared, 400'000);
      auto* values = static_cast<float*>(later.data());
      for (int turn = 0; turn < 2; ++turn) {
        for (int k = 0; k < 100'000; ++k) values[k] = float(group.rank() + turn);
        group.all_reduce(values, 100'000, DataType::float32, ReduceOp::sum);
        for (int k = 0; k < 100'000; ++k) CHECK(values[k] == float(world * (world - 1) / 2 + turn * world));
      }
    }
  });
}

}  // namespace

TEST(different_calls_are_refused_on_every_rank) {
  const Call usual{.kind = Kind::all_reduce, .count = 1000};
  Call other = usual;
  other.count = 1001;
  check_desync(3, 1, usual, other, {"ranks 0, 2 called all_reduce(sum, float32[1000])", "rank 1 called all_reduce(sum, float32[1001])"});
  other = usual, other.op = ReduceOp::mean;
  check_desync(3, 0, usual, other, {"rank 0 called all_reduce(mean, float32[1000])"});
  other = usual, other.dtype = DataType::int32;
  check_desync(2, 1, usual, other, {"int32[1000]"});
  other = usual, other.count = 200'000;
  check_desync(4, 2, usual, other, {"ranks 0, 1, 3 called", "[200000]"});
  check_desync(3, 2, usual, {.kind = Kind::barrier}, {"rank 2 called barrier()"});
  check_desync(3, 2, {.kind = Kind::broadcast, .count = 5, .root = 0}, {.kind = Kind::broadcast, .count = 5, .root = 1}, {"root 0", "root 1"});
}

TEST(labels_are_compared_and_shown) {
  Call usual{.kind = Kind::all_reduce, .count = 1000, .label = "bucket 3 (layer.weight)"}, other = usual;
  other.label = "bucket 4";
  check_desync(3, 1, usual, other, {"bucket 3 (layer.weight)", "rank 1 called all_reduce(sum, float32[1000], bucket 4)"});
}

TEST(impossible_calls_are_refused_without_breaking_the_group) {
  run_ranks(2, [](Group& group) {
    float value = 1;
    std::vector<Call> wrong = {
        {.kind = Kind::all_reduce, .output = nullptr, .count = 5},
        {.kind = Kind::all_reduce, .output = &value, .count = 1, .dtype = DataType::byte},
        {.kind = Kind::all_reduce, .output = &value, .count = UINT64_MAX / 4},
        {.kind = Kind::broadcast, .output = &value, .count = 1, .root = 2},
        {.kind = Kind::all_gather, .input = nullptr, .output = &value, .count = 1},
        {.kind = Kind::all_reduce, .output = &value, .count = 1, .label = std::string(200, 'x')},
    };
    for (const Call& call : wrong) {
      bool refused = false;
      try {
        group.run(call);
      } catch (const std::invalid_argument&) {
        refused = true;
      }
      CHECK(refused);
    }
    group.all_reduce(&value, 1, DataType::float32, ReduceOp::sum);
    CHECK(value == 2);
  });
}

// A large private all_reduce stages its first piece before it knows that all agree; what comes next must not read it.
TEST(what_was_staged_for_a_refused_call_is_never_read) {
  run_ranks(2, [](Group& group) {
    for (int turn = 0; turn < 20; ++turn) {
      std::vector<float> large(300'000 + group.rank(), 7);
      bool refused = false;
      try {
        group.all_reduce(large.data(), large.size(), DataType::float32, ReduceOp::sum);
      } catch (const Desync&) {
        refused = true;
      }
      CHECK(refused);
      std::vector<float> given(60'000, float(group.rank() + 1)), gathered(120'000);
      group.all_gather(given.data(), gathered.data(), given.size(), DataType::float32);
      for (size_t k = 0; k < gathered.size(); ++k) CHECK(gathered[k] == float(k / given.size() + 1));
    }
  });
}
