// How positions are written: ascending numbers below `numel`, in the fewest bytes of three ways.
//
//   head      the way, the Rice parameter, six bytes of zero
//   bitmap    a bit for every position
//   shorts    a count (4 bytes) for each 65536 positions, then two bytes for each
//   rice      gaps: the upper bits in unary, then all lower bits
//
// Bits are filled from the lowest, and those that are left over are zero. There is one message for given positions; whatever
// differs from it in anything but the choice of the way is refused.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

// Bytes that are enough for any `count` positions: the least of the closed bounds of the three ways.
size_t indices_room(size_t count, size_t numel);

// Returns the bytes that were written, at most `indices_room`. `numel` is at most 2^32.
size_t encode_indices(uint8_t* out, const int64_t* positions, size_t count, size_t numel);

// Writes exactly `count` positions, or throws CorruptMessage. Reads no byte outside of the message.
void decode_indices(int64_t* positions, const uint8_t* message, size_t bytes, size_t count, size_t numel);

}  // namespace syncline
