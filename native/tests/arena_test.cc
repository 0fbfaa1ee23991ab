#include "segment.h"

#include <map>

#include "harness.h"

using namespace syncline;
using namespace syncline::test;

namespace {

constexpr uint64_t mebibyte = 1 << 20;

template <class Body>
uint64_t asked_when_exhausted(const Body& body) {
  try {
    body();
  } catch (const Exhausted& error) {
    CHECK(std::string(error.what()).find(std::to_string(error.asked_bytes)) != std::string::npos);
    return error.asked_bytes;
  }
  return 0;
}

}  // namespace

TEST(blocks_never_overlap_and_come_back_together) {
  Arena arena(64 * mebibyte, 4096);
  Random random(1);
  std::map<uint64_t, uint64_t> blocks;
  for (int turn = 0; turn < 2000; ++turn) {
    if (blocks.size() > 20 || (turn % 3 == 0 && !blocks.empty())) {
      auto victim = std::next(blocks.begin(), long(random.below(blocks.size())));
      arena.release(victim->first);
      blocks.erase(victim);
      continue;
    }
    const uint64_t bytes = random.below(1 * mebibyte), alignment = random.below(2) ? 4096 : 64;
    const uint64_t offset = arena.allocate(bytes, alignment);
    CHECK(offset % alignment == 0 && offset >= 4096);
    const auto next = blocks.lower_bound(offset);
    CHECK(next == blocks.end() || offset + bytes <= next->first);
    CHECK(next == blocks.begin() || std::prev(next)->first + std::prev(next)->second <= offset);
    blocks[offset] = bytes;
    arena.data()[offset] = std::byte(1);
  }
  for (const auto& [offset, bytes] : blocks) arena.release(offset);
  const uint64_t whole = 64 * mebibyte - 8192;
  arena.release(arena.allocate(whole));  // all free space is one range again
}

TEST(a_released_block_gives_its_memory_back) {
  Arena arena(256 * mebibyte, 4096);
  for (int turn = 0; turn < 5; ++turn) {
    const uint64_t offset = arena.allocate(64 * mebibyte);
    CHECK(arena.data()[offset + 5000] == std::byte(0));
    arena.data()[offset + 5000] = std::byte(1);
    arena.release(offset);
  }
}

TEST(too_large_a_block_is_a_clear_error) {
  Arena small(8 * mebibyte, 4096);
  CHECK(asked_when_exhausted([&] { small.allocate(9 * mebibyte); }) == 9 * mebibyte);
  small.release(small.allocate(7 * mebibyte));
  if (under_thread_sanitizer) return;
  // More than the machine has: refused before anything is taken.
  Arena large(uint64_t(1) << 46, 4096);
  CHECK(asked_when_exhausted([&] { large.allocate(uint64_t(1) << 44); }) == uint64_t(1) << 44);
  large.release(large.allocate(mebibyte));
}

TEST(a_buffer_outlives_its_group) {
  std::shared_ptr<Buffer> buffer;
  {
    Group group("", 0, 1, Nonce{}, quick_settings());
    buffer = group.buffer(1000);
    CHECK(group.reaches(buffer->data(), 1000) && !group.reaches(&group, 1));
    std::vector<float> ordinary(10, 3);
    group.all_reduce(ordinary.data(), 10, DataType::float32, ReduceOp::mean);
    CHECK(ordinary[9] == 3);
  }
  std::fill_n(static_cast<char*>(buffer->data()), 1000, 'x');
}
