#include "indices.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "errors.h"

namespace syncline {

static_assert(std::endian::native == std::endian::little, "messages are little-endian");

namespace {

enum Way : uint8_t { bitmap, shorts, rice };

constexpr size_t head_bytes = 8;
constexpr size_t page = 65536;
constexpr size_t max_parameter = 40;  // lower bits are read from one word at any bit of a byte

struct Span {
  const uint8_t* data;
  size_t bytes;
};

size_t bytes_of(size_t bits) { return (bits + 7) / 8; }
size_t pages_of(size_t numel) { return (numel + page - 1) / page; }

// Eight bytes from `at`; those after the end are `missing`.
uint64_t word_at(Span span, size_t at, uint64_t missing) {
  uint64_t word = missing;
  if (at + sizeof word <= span.bytes)
    std::memcpy(&word, span.data + at, sizeof word);
  else if (at < span.bytes)
    std::memcpy(&word, span.data + at, span.bytes - at);
  return word;
}

[[noreturn]] void refuse(const char* why) { throw CorruptMessage(std::string("positions ") + why); }

void expect_bytes(Span body, size_t bytes) {
  if (body.bytes != bytes) refuse(body.bytes < bytes ? "end too early" : "are followed by something else");
}

void expect_zeros_after(Span body, size_t bits) {
  if (bits % 8 != 0 && body.data[bits / 8] >> bits % 8 != 0) refuse("are padded with ones");
}

// Writes bits side by side; up to 32 at a time.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  void put(uint64_t bits, size_t how_many) {
    pending_ |= bits << filled_;
    filled_ += how_many;
    if (filled_ >= 32) flush(4);
  }
  void end() {
    while (filled_ > 0) flush(std::min<size_t>(4, bytes_of(filled_)));
  }

 private:
  void flush(size_t bytes) {
    std::memcpy(out_, &pending_, bytes);
    out_ += bytes;
    pending_ >>= 8 * bytes;
    filled_ -= std::min(filled_, 8 * bytes);
  }
  uint8_t* out_;
  uint64_t pending_ = 0;
  size_t filled_ = 0;
};

// The number of lower bits that is best for gaps of a random selection.
size_t rice_parameter(size_t count, size_t numel) {
  const double gap = std::log(2.0) * double(numel) / double(std::max<size_t>(count, 1));
  return size_t(std::log2(std::max(gap, 1.0)));
}

// Bits of all gaps' upper parts in unary. Checks that positions ascend and are below `numel`.
size_t unary_bits(const int64_t* positions, size_t count, size_t numel, size_t parameter) {
  size_t bits = count;
  int64_t before = -1;
  for (size_t i = 0; i < count; ++i) {
    if (positions[i] <= before) throw std::invalid_argument("positions do not ascend");
    bits += size_t(positions[i] - before - 1) >> parameter;
    before = positions[i];
  }
  if (before >= int64_t(numel)) throw std::invalid_argument("positions reach beyond the values");
  return bits;
}

void write_bitmap(uint8_t* out, const int64_t* positions, size_t count, size_t numel) {
  std::memset(out, 0, bytes_of(numel));
  for (size_t i = 0; i < count; ++i) out[positions[i] / 8] |= uint8_t(1u << positions[i] % 8);
}

void write_shorts(uint8_t* out, const int64_t* positions, size_t count, size_t numel) {
  uint8_t* to = out + 4 * pages_of(numel);
  for (size_t number = 0, i = 0; number < pages_of(numel); ++number) {
    const size_t first = i;
    for (; i < count && size_t(positions[i]) < (number + 1) * page; ++i, to += 2) {
      const auto within = uint16_t(size_t(positions[i]) % page);
      std::memcpy(to, &within, sizeof within);
    }
    const auto in_page = uint32_t(i - first);
    std::memcpy(out + 4 * number, &in_page, sizeof in_page);
  }
}

void write_rice(uint8_t* out, const int64_t* positions, size_t count, size_t parameter, size_t bits) {
  std::memset(out, 0xff, bytes_of(bits));
  BitWriter lower(out + bytes_of(bits));
  const uint64_t mask = (uint64_t(1) << parameter) - 1;
  int64_t before = -1;
  size_t end = 0;
  for (size_t i = 0; i < count; ++i, ++end) {
    const auto gap = uint64_t(positions[i] - before - 1);
    before = positions[i];
    end += gap >> parameter;
    out[end / 8] &= uint8_t(~(1u << end % 8));
    lower.put(gap & mask, parameter);
  }
  if (bits % 8 != 0) out[bits / 8] &= uint8_t((1u << bits % 8) - 1);
  lower.end();
}

void read_bitmap(int64_t* positions, Span body, size_t count, size_t numel) {
  expect_bytes(body, bytes_of(numel));
  expect_zeros_after(body, numel);
  size_t found = 0;
  for (size_t at = 0; at < body.bytes; at += 8) {
    uint64_t word = word_at(body, at, 0);
    if (found + size_t(std::popcount(word)) > count) refuse("are more than announced");
    for (; word != 0; word &= word - 1) positions[found++] = int64_t(8 * at + size_t(std::countr_zero(word)));
  }
  if (found < count) refuse("are fewer than announced");
}

void read_shorts(int64_t* positions, Span body, size_t count, size_t numel) {
  expect_bytes(body, 4 * pages_of(numel) + 2 * count);
  const uint8_t* from = body.data + 4 * pages_of(numel);
  size_t found = 0;
  for (size_t number = 0; number < pages_of(numel); ++number) {
    uint32_t in_page;
    std::memcpy(&in_page, body.data + 4 * number, sizeof in_page);
    if (in_page > count - found) refuse("are more than announced");
    int64_t before = -1;
    for (const size_t end = found + in_page; found < end; ++found, from += 2) {
      uint16_t within;
      std::memcpy(&within, from, sizeof within);
      if (within <= before) refuse("do not ascend");
      before = within;
      positions[found] = int64_t(number * page + within);
    }
  }
  if (found < count) refuse("are fewer than announced");
  if (count > 0 && size_t(positions[count - 1]) >= numel) refuse("reach beyond the values");
}

// Every one in a word of `zeros` ends a code of the unary part: it is inverted as it is read, with nothing after its end.
void read_rice(int64_t* positions, Span body, size_t count, size_t numel, size_t parameter) {
  if (parameter > max_parameter || bytes_of(count * parameter) > body.bytes) refuse("end before their lower bits do");
  const Span unary{body.data, body.bytes - bytes_of(count * parameter)};
  const Span lower{body.data + unary.bytes, body.bytes - unary.bytes};
  const uint64_t mask = (uint64_t(1) << parameter) - 1;
  uint64_t zeros = 0, position = 0;
  size_t next = 0, start = 0;
  for (size_t i = 0; i < count; ++i, ++position) {
    for (; zeros == 0; next += 8) {
      if (next >= unary.bytes) refuse("are fewer than announced");
      zeros = ~word_at(unary, next, ~uint64_t(0));
    }
    const size_t end = 8 * (next - 8) + size_t(std::countr_zero(zeros));
    zeros &= zeros - 1;
    const uint64_t upper = end - start, bit = i * parameter;
    start = end + 1;
    if (upper > numel >> parameter) refuse("reach beyond the values");
    position += (upper << parameter) + (word_at(lower, bit / 8, 0) >> bit % 8 & mask);
    if (position >= numel) refuse("reach beyond the values");
    positions[i] = int64_t(position);
  }
  expect_bytes(unary, bytes_of(start));
  expect_zeros_after(unary, start);
  expect_zeros_after(lower, count * parameter);
}

}  // namespace

size_t indices_room(size_t count, size_t numel) {
  const size_t parameter = rice_parameter(count, numel);
  const size_t unary = count + ((numel - std::min(count, numel)) >> parameter);
  const size_t gaps = bytes_of(unary) + bytes_of(count * parameter);
  return head_bytes + std::min({bytes_of(numel), 4 * pages_of(numel) + 2 * count, gaps});
}

size_t encode_indices(uint8_t* out, const int64_t* positions, size_t count, size_t numel) {
  const size_t parameter = rice_parameter(count, numel);
  const size_t bits = unary_bits(positions, count, numel, parameter);
  const size_t sizes[] = {bytes_of(numel), 4 * pages_of(numel) + 2 * count, bytes_of(bits) + bytes_of(count * parameter)};
  const auto way = Way(std::min_element(sizes, sizes + 3) - sizes);
  const uint8_t head[head_bytes] = {way, uint8_t(parameter)};
  std::memcpy(out, head, head_bytes);
  if (way == bitmap) write_bitmap(out + head_bytes, positions, count, numel);
  if (way == shorts) write_shorts(out + head_bytes, positions, count, numel);
  if (way == rice) write_rice(out + head_bytes, positions, count, parameter, bits);
  return head_bytes + sizes[way];
}

void decode_indices(int64_t* positions, const uint8_t* message, size_t bytes, size_t count, size_t numel) {
  uint8_t head[head_bytes];
  if (bytes < head_bytes || count > numel) refuse("do not begin as they should");
  std::memcpy(head, message, head_bytes);
  if (head[0] > rice || std::any_of(head + 2, head + head_bytes, [](uint8_t byte) { return byte != 0; }))
    refuse("do not begin as they should");
  const Span body{message + head_bytes, bytes - head_bytes};
  if (head[0] == bitmap) read_bitmap(positions, body, count, numel);
  if (head[0] == shorts) read_shorts(positions, body, count, numel);
  if (head[0] == rice) read_rice(positions, body, count, numel, head[1]);
}

}  // namespace syncline
