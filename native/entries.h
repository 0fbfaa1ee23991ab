// Messages of chosen entries of float32 values:
//
//   count, bytes of positions (8 bytes each) | positions, as in indices.h | values
//
// Values are float32, float16, or integers of 8 bits after a scale (float32) for every 256 of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

enum class Form : int { fp32, fp16, int8 };

struct Message {
  const uint8_t* data;
  size_t bytes;
};

size_t entries_room(size_t count, size_t numel, Form);  // bytes that are enough for any `count` entries

// Writes the entries at these positions, which ascend, and takes away from them what the message says. Returns its bytes.
size_t take_entries(uint8_t* message, float* values, size_t numel, const int64_t* positions, size_t count, Form);

// out = the sum of the messages' entries, in their order, divided by their number. Zeros may fill a message up. All messages
// are checked before anything is written; throws CorruptMessage.
void mean_of_entries(float* out, size_t numel, const Message* messages, size_t num_messages, Form);

}  // namespace syncline
