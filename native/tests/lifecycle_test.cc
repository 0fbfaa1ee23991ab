#include <sys/wait.h>
#include <unistd.h>

#include "twin.h"

using namespace syncline;
using namespace syncline::test;

TEST(three_hundred_groups_leave_nothing_behind) {
  const int cycles = under_thread_sanitizer || under_address_sanitizer ? 30 : 300;
  run_ranks(2, [cycles](Group& group) {
    int descriptors = 0, maps = 0;
    for (int cycle = 0; cycle < cycles; ++cycle) {
      Place place = Place::fresh();
      place.address = "@syncline-cycle-" + std::to_string(getppid()) + "-" + std::to_string(cycle);
      place.nonce = {uint8_t(cycle), uint8_t(cycle >> 8), 9};
      Group inner(place.address, group.rank(), 2, place.nonce, quick_settings());
      auto buffer = inner.buffer(1 << 20);
      inner.all_reduce(buffer->data(), 1000, DataType::float32, ReduceOp::sum);
      std::vector<float> values(1000);
      inner.submit({.kind = Kind::all_reduce, .output = values.data(), .count = 1000})->wait();
      inner.close();
      buffer.reset();
      group.barrier();
      if (cycle == 10) descriptors = open_descriptors(), maps = mappings();
    }
    if (under_thread_sanitizer || under_address_sanitizer) return;
    CHECK(open_descriptors() <= descriptors, "%d then %d", descriptors, open_descriptors());
    CHECK(mappings() <= maps + 2, "%d then %d", maps, mappings());
  });
}

TEST(a_forked_child_may_not_use_the_group_nor_free_its_memory) {
  if (under_thread_sanitizer) return;
  run_ranks(2, [](Group& group) {
    auto buffer = group.buffer(1 << 20);
    auto* values = static_cast<float*>(buffer->data());
    std::vector<float> other(10, 1);
    group.submit({.kind = Kind::all_reduce, .output = other.data(), .count = 10})->wait();
    values[1000] = 5;
    const pid_t child = fork();
    if (child == 0) {
      int refused = 0;
      try {
        group.barrier();
      } catch (const std::logic_error&) {
        ++refused;
      }
      try {
        group.submit({.kind = Kind::barrier});
      } catch (const std::logic_error&) {
        ++refused;
      }
      buffer.reset();
      group.close();
      _exit(refused == 2 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    group.all_reduce(values, 2000, DataType::float32, ReduceOp::sum);
    CHECK(values[1000] == 10);
  });
}

TEST(a_rank_that_leaves_early_is_named) {
  run_ranks(3, [](Group& group) {
    group.barrier();
    if (group.rank() == 1) return group.close();
    int culprit = -1;
    std::string text;
    try {
      group.barrier();
    } catch (const PeerLost& error) {
      culprit = error.rank;
      text = error.what();
    }
    CHECK(culprit == 1 && text.find("closed") != std::string::npos, "%s", text.c_str());
  });
}

TEST(the_last_operation_may_be_followed_by_exit) {
  // The fast ranks are gone while the slow one still reads their memory.
  for (const bool shared : {true, false})
    run_ranks(3, [shared](Group& group) {
      Memory memory(group, shared, 4'000'000);
      auto* values = static_cast<float*>(memory.data());
      std::fill_n(values, 1'000'000, float(group.rank()));
      group.all_reduce(values, 1'000'000, DataType::float32, ReduceOp::sum);
      CHECK(values[0] == 3 && values[999'999] == 3);
    });
}
