#include <thread>

#include "clock.h"
#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

Call sum_of(std::vector<int64_t>& values) {
  return {.kind = Kind::all_reduce, .output = values.data(), .count = values.size(), .dtype = DataType::int64};
}

void check_sum(Group& group, const std::vector<int64_t>& values, int64_t added) {
  const int64_t w = group.world();
  for (size_t i = 0; i < values.size(); ++i) CHECK(values[i] == w * (w - 1) / 2 + w * added);
}

}  // namespace

TEST(submitted_calls_are_done_in_order) {
  run_ranks(3, [](Group& group) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<int64_t>> values;
      for (int k = 0; k < 10; ++k) values.emplace_back(k % 3 == 0 ? 100'000 : 10 * k, group.rank() + k);
      std::vector<std::shared_ptr<Handle>> handles;
      for (auto& each : values) handles.push_back(group.submit(sum_of(each)));
      // A blocking call goes behind them.
      std::vector<int64_t> last(50, group.rank() + 7);
      group.run(sum_of(last));
      for (auto& handle : handles) CHECK(handle->done());
      for (auto& handle : handles) CHECK(handle->wait(0));
      for (int k = 0; k < 10; ++k) check_sum(group, values[k], k);
      check_sum(group, last, 7);
    }
  });
}

TEST(a_handle_waits_no_longer_than_asked) {
  run_ranks(2, [](Group& group) {
    std::vector<int64_t> values(10, group.rank());
    if (group.rank() == 1) sleep_s(0.4);
    auto handle = group.submit(sum_of(values));
    if (group.rank() == 0) {
      CHECK(!handle->wait(0.1));
      CHECK(!handle->done());
      CHECK(group.suspect() == 1);
    }
    CHECK(handle->wait(10));
    check_sum(group, values, 0);
  });
}

TEST(calls_from_several_threads_all_arrive) {
  // Equal calls, so that their order between threads does not matter.
  run_ranks(2, [](Group& group) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&] {
        for (int turn = 0; turn < 200; ++turn) {
          std::vector<int64_t> values(1000, 5);
          turn % 3 == 0 ? (void)group.submit(sum_of(values))->wait() : group.run(sum_of(values));
          for (const int64_t value : values) wrong += value != 10;
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
  });
}

TEST(an_error_in_the_worker_comes_out_of_wait) {
  run_ranks(2, [](Group& group) {
    std::vector<int64_t> values(group.rank() == 0 ? 10 : 11, 1);
    auto handle = group.submit(sum_of(values));
    auto later = group.submit(sum_of(values));
    for (auto& each : {handle, later}) {
      bool raised = false;
      try {
        each->wait();
      } catch (const Desync&) {
        raised = true;
      }
      CHECK(raised);
    }
  });
}

TEST(closing_drains_what_was_submitted) {
  run_ranks(2, [](Group& group) {
    std::vector<int64_t> values(200'000, group.rank());
    auto handle = group.submit(sum_of(values));
    group.close();
    CHECK(handle->done() && handle->wait());
    check_sum(group, values, 0);
    bool refused = false;
    try {
      group.barrier();
    } catch (const std::logic_error&) {
      refused = true;
    }
    CHECK(refused);
  });
}

TEST(closing_without_draining_fails_the_others_too) {
  run_ranks(3, [](Group& group) {
    std::vector<int64_t> values(10, 0);
    if (group.rank() == 2) {
      sleep_s(0.3);
      return;  // never calls
    }
    auto handle = group.submit(sum_of(values));
    if (group.rank() == 1) {
      sleep_s(0.1);
      group.close(false);
    }
    int culprit = -1;
    try {
      handle->wait(20);
    } catch (const Aborted& error) {
      culprit = error.rank;
    }
    CHECK(culprit == 1);
  });
}

TEST(a_signal_handler_may_interrupt_a_wait) {
  struct Interrupt : std::runtime_error { using std::runtime_error::runtime_error; };
  Settings settings = quick_settings();
  settings.check_signals = [start = now_s()] {
    if (now_s() - start > 0.3) throw Interrupt("stop");
  };
  run_ranks(2, [](Group& group) {
    if (group.rank() == 1) return sleep_s(0.8);
    bool interrupted = false;
    try {
      group.barrier();
    } catch (const Interrupt&) {
      interrupted = true;
    }
    CHECK(interrupted);
  }, settings);
}

TEST(the_times_of_a_call_are_in_order_and_show_who_was_late) {
  run_ranks(2, [](Group& group) {
    std::vector<int64_t> values(1000, group.rank());
    group.barrier();
    if (group.rank() == 1) sleep_s(0.3);
    const uint64_t before = now_ns();
    auto handle = group.submit(sum_of(values));
    if (group.rank() == 0) {
      CHECK(!handle->wait(0.05));
      CHECK(handle->times().ended_ns == 0);  // not done yet
    }
    CHECK(handle->wait(20));
    const Times times = handle->times();
    CHECK(before <= times.began_ns && times.began_ns <= times.met_ns);
    CHECK(times.met_ns <= times.ended_ns && times.ended_ns <= now_ns());
    const double waited_s = double(times.met_ns - times.began_ns) * 1e-9;
    CHECK(group.rank() == 0 ? waited_s >= 0.25 : waited_s < 0.2, "(rank %d waited %.3f s)", group.rank(), waited_s);

    std::vector<std::vector<int64_t>> more(5, std::vector<int64_t>(100'000, 1));
    std::vector<std::shared_ptr<Handle>> handles;
    for (auto& each : more) handles.push_back(group.submit(sum_of(each)));
    uint64_t last = times.ended_ns;
    for (auto& each : handles) {
      CHECK(each->wait(20));
      CHECK(last <= each->times().began_ns);  // one after the other
      last = each->times().ended_ns;
    }
  });
}

TEST(notes_can_be_read_by_all_ranks_at_any_time) {
  run_ranks(3, [](Group& group) {
    const auto note_for = [](int rank, uint64_t turn) { return Note{uint64_t(rank) + 1, turn, UINT64_MAX - turn, 7}; };
    for (int rank = 0; rank < group.world(); ++rank) CHECK(group.note_of(rank) == Note{});
    for (uint64_t turn = 1; turn < 4; ++turn) {
      group.barrier();
      group.write_note(note_for(group.rank(), turn));
      CHECK(group.note_of(group.rank()) == note_for(group.rank(), turn));
      group.barrier();
      for (int rank = 0; rank < group.world(); ++rank) CHECK(group.note_of(rank) == note_for(rank, turn));
    }
    for (const int rank : {-1, group.world()}) {
      bool refused = false;
      try {
        (void)group.note_of(rank);
      } catch (const std::invalid_argument&) {
        refused = true;
      }
      CHECK(refused);
    }
    group.barrier();
    if (group.rank() == 2) return;  // leaves, and its note stays
    sleep_s(0.3);
    CHECK(group.note_of(2) == note_for(2, 3));
  });
}
