// Messages of entries and their positions: they come back, and no corrupt one is read or written out of bounds. Buffers
// are as long as they are said to be, so that the address sanitizer sees every byte beyond.
#include "entries.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "errors.h"
#include "harness.h"
#include "indices.h"

using namespace syncline;
using namespace syncline::test;

namespace {

using Bytes = std::vector<uint8_t>;
using Positions = std::vector<int64_t>;

constexpr Form forms[] = {Form::fp32, Form::fp16, Form::int8};
constexpr double densities[] = {0.0, 0.0005, 0.01, 0.2, 0.9, 1.0};
constexpr size_t lengths[] = {0, 1, 7, 64, 65, 3000, 70'000, 200'000};

Positions chosen_at_random(size_t numel, double density, Random& random) {
  Positions positions;
  for (size_t i = 0; i < numel; ++i)
    if (random.uniform() < density) positions.push_back(int64_t(i));
  return positions;
}

// Shorts, which are valid for any positions though Rice codes are shorter.
Bytes as_shorts(const Positions& positions, size_t numel) {
  Bytes message = {1, 0, 0, 0, 0, 0, 0, 0};
  message.resize(8 + (numel + 65535) / 65536 * 4);
  for (const int64_t position : positions) {
    ++message[8 + size_t(position) / 65536 * 4];  // fewer than 256 in a page
    message.push_back(uint8_t(position));
    message.push_back(uint8_t(position >> 8));
  }
  message.shrink_to_fit();
  return message;
}

Bytes encoded(const Positions& positions, size_t numel) {
  Bytes message(indices_room(positions.size(), numel));
  message.resize(encode_indices(message.data(), positions.data(), positions.size(), numel));
  return message;
}

std::vector<float> noise(size_t count, Random& random) {
  std::vector<float> values(count);
  for (float& value : values) value = float(random.uniform() * 4 - 2);
  return values;
}

Bytes taken(std::vector<float>& values, const Positions& positions, Form form) {
  Bytes message(entries_room(positions.size(), values.size(), form));
  message.resize(take_entries(message.data(), values.data(), values.size(), positions.data(), positions.size(), form));
  return message;
}

// One of the things that happen to messages; a new buffer of exactly its length.
Bytes corrupted(const Bytes& message, Random& random) {
  const uint64_t what = random.below(5);
  if (what == 0) return Bytes(message.begin(), message.begin() + long(random.below(message.size())));
  Bytes broken = message;
  if (what == 1) {
    broken.resize(message.size() + 1 + random.below(20), uint8_t(random.next()));
    broken.shrink_to_fit();
    return broken;
  }
  const size_t reach = what == 2 ? std::min<size_t>(broken.size(), 26) : broken.size();
  for (uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
    uint8_t& byte = broken[random.below(reach)];
    byte = what == 4 ? byte ^ uint8_t(1u << random.below(8)) : uint8_t(random.next());
  }
  return broken;
}

// Whether the positions were accepted; if so they must be what positions have to be.
bool reads_positions(const Bytes& message, size_t count, size_t numel) {
  Positions found(count, -1);
  try {
    decode_indices(found.data(), message.data(), message.size(), count, numel);
  } catch (const CorruptMessage&) {
    return false;
  }
  for (size_t i = 0; i < count; ++i) CHECK(found[i] > (i == 0 ? -1 : found[i - 1]) && found[i] < int64_t(numel));
  return true;
}

bool reads_entries(const Bytes& good, const Bytes& message, size_t numel, Form form) {
  const std::vector<float> before(numel, 7.0f);
  std::vector<float> out = before;
  const Message both[] = {{good.data(), good.size()}, {message.data(), message.size()}};
  try {
    mean_of_entries(out.data(), numel, both, 2, form);
  } catch (const CorruptMessage&) {
    CHECK(out == before, "a refused message has changed the mean");
    return false;
  }
  return true;
}

}  // namespace

TEST(positions_come_back) {
  Random random(1);
  for (const size_t numel : lengths)
    for (const double density : densities) {
      const Positions positions = chosen_at_random(numel, density, random);
      const Bytes message = encoded(positions, numel);
      Positions found(positions.size());
      decode_indices(found.data(), message.data(), message.size(), found.size(), numel);
      CHECK(found == positions, "%zu of %zu", positions.size(), numel);
    }
}

TEST(positions_that_cannot_be_are_not_written) {
  for (const Positions& positions : {Positions{3, 3}, Positions{4, 2}, Positions{-1}, Positions{5, 100}}) {
    bool refused = false;
    try {
      encoded(positions, 100);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

TEST(corrupt_positions_are_refused_or_in_bounds) {
  Random random(2);
  const size_t numel = 70'001;
  const Positions few = chosen_at_random(numel, 0.002, random);
  std::vector<std::pair<Positions, Bytes>> all = {{few, as_shorts(few, numel)}};
  for (const double density : densities) {
    const Positions positions = chosen_at_random(numel, density, random);
    all.emplace_back(positions, encoded(positions, numel));
  }
  bool seen[3] = {};
  for (const auto& [positions, message] : all) {
    seen[message[0]] = true;
    CHECK(reads_positions(message, positions.size(), numel));
    int refused = 0;
    for (int attempt = 0; attempt < 1500; ++attempt) {
      const size_t count = attempt % 5 == 0 ? random.below(2 * positions.size() + 2) : positions.size();
      refused += !reads_positions(corrupted(message, random), count, numel);
    }
    CHECK(refused > 500, "%d of 1500 were refused", refused);
  }
  CHECK(seen[0] && seen[1] && seen[2]);
}

TEST(every_way_and_every_parameter_of_any_bytes_is_refused_or_in_bounds) {
  Random random(3);
  for (int attempt = 0; attempt < 30'000; ++attempt) {
    Bytes message(8 + random.below(60));
    for (uint8_t& byte : message) byte = random.below(3) == 0 ? uint8_t(random.next()) : random.below(2) ? 0 : 0xff;
    message[0] = uint8_t(random.below(4));
    message[1] = uint8_t(random.below(4) == 0 ? random.next() : random.below(42));
    std::memset(message.data() + 2, 0, 6);
    const size_t numel = size_t(1) << random.below(32);
    reads_positions(message, std::min<size_t>(numel, random.below(40)), numel);
  }
}

TEST(a_rice_code_that_is_too_long_is_refused) {
  const Bytes message = encoded({5, 900, 2000}, 100'000);
  CHECK(message[0] == 2);
  CHECK(reads_positions(message, 3, 100'000));
  CHECK(!reads_positions(message, 2, 100'000));  // a code is left over
  CHECK(!reads_positions(message, 4, 100'000));
  CHECK(!reads_positions(message, 3, 1500));  // the last one is beyond
  Bytes longer = message;
  longer.insert(longer.begin() + 8, 0xff);  // eight more ones in unary
  CHECK(!reads_positions(longer, 3, 100'000));
  Bytes endless = message;
  std::fill(endless.begin() + 8, endless.end(), uint8_t(0xff));
  CHECK(!reads_positions(endless, 3, 100'000));
}

TEST(what_is_taken_is_what_the_mean_has) {
  Random random(4);
  for (const Form form : forms)
    for (const size_t numel : lengths)
      for (const double density : densities) {
        const auto values = noise(numel, random);
        auto rest = values;
        const Positions positions = chosen_at_random(numel, density, random);
        const Bytes message = taken(rest, positions, form);
        std::vector<float> out(numel, 7.0f), wanted(numel, 0.0f);
        const Message three[] = {{message.data(), message.size()}, {message.data(), message.size()}, {message.data(), message.size()}};
        mean_of_entries(out.data(), numel, three, 3, form);
        for (const int64_t at : positions) wanted[size_t(at)] = values[size_t(at)] - rest[size_t(at)];
        for (size_t i = 0; i < numel; ++i) {
          CHECK(std::fabs(out[i] - wanted[i]) <= 1e-6f, "%zu of %zu", i, numel);
          CHECK(wanted[i] != 0.0f || rest[i] == values[i]);
        }
        for (const int64_t at : positions) CHECK(std::fabs(rest[size_t(at)]) <= (form == Form::fp32 ? 0.0f : 0.01f));
      }
}

TEST(corrupt_entries_are_refused_or_in_bounds) {
  Random random(5);
  const size_t numel = 5003;
  for (const Form form : forms)
    for (const double density : {0.002, 0.05, 0.9}) {
      auto values = noise(numel, random);
      const Bytes message = taken(values, chosen_at_random(numel, density, random), form);
      CHECK(reads_entries(message, message, numel, form));
      int refused = 0;
      for (int attempt = 0; attempt < 1000; ++attempt)
        refused += !reads_entries(message, corrupted(message, random), numel, form);
      CHECK(refused > 400, "%d of 1000 were refused", refused);
    }
}

TEST(a_count_that_overflows_is_refused) {
  std::vector<float> values(100, 1.0f);
  const Bytes message = taken(values, {1, 50}, Form::fp32);
  for (const uint64_t count : {uint64_t(3), uint64_t(101), uint64_t(1) << 62, std::numeric_limits<uint64_t>::max()})
    for (const size_t field : {0, 8}) {
      Bytes broken = message;
      std::memcpy(broken.data() + field, &count, sizeof count);
      CHECK(!reads_entries(message, broken, 100, Form::fp32));
    }
}
