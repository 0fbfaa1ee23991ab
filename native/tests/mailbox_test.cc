#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

std::vector<uint32_t> message(int source, int to, int number, size_t count) {
  std::vector<uint32_t> values(count);
  for (size_t k = 0; k < count; ++k) values[k] = uint32_t(source * 1'000'003 + to * 10'007 + number * 101 + int(k));
  return values;
}

}  // namespace

TEST(messages_arrive_in_order_and_whole) {
  run_ranks(3, [](Group& group) {
    const int rank = group.rank(), to = (rank + 1) % 3, source = (rank + 2) % 3;
    for (const size_t count : {0, 1, 7, 100'000}) {
      std::vector<std::vector<uint32_t>> sent, received(20, std::vector<uint32_t>(count));
      uint64_t last_sent = 0, last_received = 0;
      for (int number = 0; number < 20; ++number) {
        sent.push_back(message(rank, to, number, count));
        last_sent = group.send(sent.back().data(), count * 4, to);
        last_received = group.receive(received[number].data(), count * 4, source);
      }
      group.wait_received(source, last_received);
      group.wait_sent(to, last_sent);
      for (int number = 0; number < 20; ++number) CHECK(received[number] == message(source, rank, number, count));
    }
  });
}

TEST(a_sender_waits_when_too_many_are_on_their_way) {
  run_ranks(2, [](Group& group) {
    constexpr int total = 200;
    for (int number = 0; number < total; ++number) {
      if (group.rank() == 0) {
        const auto values = message(0, 1, number, 50);
        group.send(values.data(), 200, 1);
      } else {
        std::vector<uint32_t> values(50);
        group.wait_received(0, group.receive(values.data(), 200, 0));
        CHECK(values == message(0, 1, number, 50));
      }
    }
    group.barrier();
  });
}

TEST(shared_memory_is_sent_in_place_and_read_when_it_is_taken) {
  run_ranks(2, [](Group& group) {
    Memory memory(group, true, 4096);
    auto* values = static_cast<uint32_t*>(memory.data());
    values[0] = 41;
    if (group.rank() == 0) {
      const uint64_t number = group.send(values, 4, 1);
      values[0] = 42;  // against the rule, to see that nothing was copied
      group.barrier();
      group.wait_sent(1, number);
    } else {
      group.barrier();
      group.wait_received(0, group.receive(values, 4, 0));
      CHECK(values[0] == 42);
    }
  });
}

TEST(a_message_of_another_size_is_refused) {
  run_ranks(2, [](Group& group) {
    std::vector<uint32_t> values(10);
    if (group.rank() == 0) return group.wait_sent(1, group.send(values.data(), 40, 1));
    bool refused = false;
    try {
      group.wait_received(0, group.receive(values.data(), 36, 0));
    } catch (const Desync& error) {
      refused = error.rank == 0;
    }
    CHECK(refused);
  });
}

TEST(a_message_that_never_comes_names_its_sender) {
  Settings settings = quick_settings();
  settings.deadline_s = 0.5;
  run_ranks(2, [](Group& group) {
    uint32_t value = 0;
    int culprit = -1;
    if (group.rank() == 0) return sleep_s(1.5);
    try {
      group.wait_received(0, group.receive(&value, 4, 0));
    } catch (const PeerStalled& error) {
      culprit = error.rank;
    }
    CHECK(culprit == 0);
  }, settings);
}
