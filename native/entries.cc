#include "entries.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codec_kernels.h"
#include "errors.h"
#include "halves.h"
#include "indices.h"
#include "kernels.h"

namespace syncline {

namespace {

constexpr size_t head_bytes = 16;
constexpr size_t block = 256;           // values that share a scale; also how many are converted at a time
constexpr size_t window = size_t(1) << 12;  // entries of the mean that are made at a time, in the first-level cache

struct Entries {
  size_t count;
  std::unique_ptr<int64_t[]> positions;
  std::unique_ptr<float[]> values;
};

struct Head {
  uint64_t count, position_bytes;
};

// Bytes of `count` values; the count may be anything that a message announces, up to 2^58.
size_t value_bytes(size_t count, Form form) {
  if (form == Form::int8) return count + (count + block - 1) / block * sizeof(float);
  return count * (form == Form::fp16 ? 2 : 4);
}

// Up to a block of values: `scale` and `to` are where their scale and they belong. The values become what the message says.
void write_block(uint8_t* scale, uint8_t* to, float* values, size_t count, Form form) {
  if (form == Form::fp32) std::memcpy(to, values, count * sizeof(float));
  if (form == Form::fp16) {
    uint16_t halves[block];
    narrow_saturated(halves, values, count, DataType::float16);
    std::memcpy(to, halves, count * sizeof(uint16_t));
    widen(values, halves, count, DataType::float16);
  }
  if (form == Form::int8) {
    float own;
    codec_kernels().quantize(&own, to, values, nullptr, count, block, 8);
    std::memcpy(scale, &own, sizeof own);
    codec_kernels().dequantize(values, &own, to, count, block, 8, How::write);
  }
}

void read_block(float* values, const uint8_t* scale, const uint8_t* from, size_t count, Form form) {
  if (form == Form::fp32) std::memcpy(values, from, count * sizeof(float));
  if (form == Form::fp16) {
    uint16_t halves[block];
    std::memcpy(halves, from, count * sizeof(uint16_t));
    widen(values, halves, count, DataType::float16);
  }
  if (form == Form::int8) {
    float own;
    std::memcpy(&own, scale, sizeof own);
    codec_kernels().dequantize(values, &own, from, count, block, 8, How::write);
  }
}

// Calls body(scale, values, first, how_many) for every block of the values that a message has from `start` on.
template <class Byte, class Body>
void for_each_block(Byte* start, size_t count, Form form, const Body& body) {
  const size_t scales = form == Form::int8 ? (count + block - 1) / block * sizeof(float) : 0;
  const size_t each = form == Form::int8 ? 1 : form == Form::fp16 ? 2 : 4;
  for (size_t at = 0; at < count; at += block) {
    Byte* scale = scales == 0 ? nullptr : start + at / block * sizeof(float);
    body(scale, start + scales + at * each, at, std::min(block, count - at));
  }
}

// The message without the zeros that fill it up, if it announces a length and nothing but zeros follows.
Message without_filling(Message message, Form form) {
  Head head{};
  if (message.bytes < head_bytes) return message;
  std::memcpy(&head, message.data, head_bytes);
  const size_t rest = message.bytes - head_bytes;
  if (head.count > rest || head.position_bytes > rest) return message;  // an entry has a byte at least
  const size_t body = head.position_bytes + value_bytes(head.count, form);
  if (body >= rest) return message;
  const uint8_t* end = message.data + head_bytes + body;
  return std::all_of(end, message.data + message.bytes, [](uint8_t byte) { return byte == 0; })
             ? Message{message.data, head_bytes + body}
             : message;
}

Head read_head(Message message, size_t numel, Form form) {
  Head head{};
  if (message.bytes >= head_bytes) std::memcpy(&head, message.data, head_bytes);
  const size_t rest = message.bytes - std::min(message.bytes, head_bytes);
  if (message.bytes < head_bytes || head.count > numel || head.position_bytes > rest ||
      value_bytes(head.count, form) != rest - head.position_bytes)
    throw CorruptMessage("a message of " + std::to_string(message.bytes) + " bytes announces " + std::to_string(head.count) +
                         " entries of " + std::to_string(numel));
  return head;
}

// What is allocated is no more than a few times the message, as its length was compared with the count.
Entries read_entries(Message message, size_t numel, Form form) {
  const auto [count, position_bytes] = read_head(message, numel, form);
  Entries entries{count, std::make_unique_for_overwrite<int64_t[]>(count), std::make_unique_for_overwrite<float[]>(count)};
  const uint8_t* positions = message.data + head_bytes;
  decode_indices(entries.positions.get(), positions, position_bytes, count, numel);
  for_each_block(positions + position_bytes, count, form,
                 [&](const uint8_t* scale, const uint8_t* from, size_t at, size_t now) {
                   read_block(entries.values.get() + at, scale, from, now, form);
                 });
  return entries;
}

// Adds the entries below `end`, from number `next` on; returns the number of the first one that is left.
size_t add_below(float* out, const Entries& entries, size_t next, size_t end) {
  for (; next < entries.count && size_t(entries.positions[next]) < end; ++next)
    out[entries.positions[next]] += entries.values[next];
  return next;
}

}  // namespace

size_t entries_room(size_t count, size_t numel, Form form) {
  return head_bytes + indices_room(count, numel) + value_bytes(count, form);
}

size_t take_entries(uint8_t* message, float* values, size_t numel, const int64_t* positions, size_t count, Form form) {
  const size_t position_bytes = encode_indices(message + head_bytes, positions, count, numel);
  const Head head{count, position_bytes};
  std::memcpy(message, &head, head_bytes);
  for_each_block(message + head_bytes + position_bytes, count, form,
                 [&](uint8_t* scale, uint8_t* to, size_t at, size_t now) {
                   float some[block];
                   for (size_t i = 0; i < now; ++i) some[i] = values[positions[at + i]];
                   write_block(scale, to, some, now, form);
                   for (size_t i = 0; i < now; ++i) values[positions[at + i]] -= some[i];
                 });
  return head_bytes + position_bytes + value_bytes(count, form);
}

void mean_of_entries(float* out, size_t numel, const Message* messages, size_t num_messages, Form form) {
  std::vector<Entries> all;
  for (size_t k = 0; k < num_messages; ++k) all.push_back(read_entries(without_filling(messages[k], form), numel, form));
  std::vector<size_t> next(num_messages);
  for (size_t at = 0; at < numel; at += window) {
    const size_t end = std::min(at + window, numel);
    std::fill(out + at, out + end, 0.0f);
    for (size_t k = 0; k < num_messages; ++k) next[k] = add_below(out, all[k], next[k], end);
    divide(out + at, out + at, end - at, DataType::float32, int(num_messages));
  }
}

}  // namespace syncline
