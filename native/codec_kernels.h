// The kernels of codecs: float32 values to messages and back. Messages are laid out by the callers in Python.
//
// A block of values shares a scale; the last block may be short. Bits and halves of bytes are filled from the lowest.
//
// Values to encode are finite. Then all instruction sets, and the kernels in torch, write the same bits: magnitudes of a
// block are added in 16 lanes, every 16th value from the first to the last, and then the lanes from the first to the last.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

enum class How { write, add, subtract };  // what is done with values that are decoded

struct CodecTable {
  // Integers of 8 or 4 bits: the largest of a block becomes 127 or 7. `noise` in [0, 1) rounds at random; null rounds to nearest.
  void (*quantize)(float* scales, uint8_t* codes, const float* values, const float* noise, size_t count, size_t block, int bits);
  void (*dequantize)(float* out, const float* scales, const uint8_t* codes, size_t count, size_t block, int bits, How how);

  // Signs, 1 for zero and above, and the mean magnitude of each block as a bfloat16.
  void (*pack_signs)(uint16_t* scales, uint8_t* bits, const float* values, size_t count, size_t block);
  void (*unpack_signs)(float* out, const uint16_t* scales, const uint8_t* bits, size_t count, size_t block, How how);

  // out = gradient + residual, or the gradient where there is no residual; out may be either. Returns the largest magnitude,
  // which is not finite if any value is not.
  float (*add_residual)(float* out, const float* gradient, const float* residual, size_t count);

  // Writes the positions whose magnitude, as the bits of a float, is at least `least`; returns how many, at most `room`.
  size_t (*collect)(uint32_t* positions, size_t room, const float* values, size_t count, uint32_t least);
};

// A message, and what it says is taken away from the values: some at a time, while they are in the cache.
void take_quantized(const CodecTable&, float* scales, uint8_t* codes, float* values, const float* noise, size_t count,
                    size_t block, int bits);
void take_signs(const CodecTable&, uint16_t* scales, uint8_t* bits, float* values, size_t count, size_t block);

const CodecTable& codec_kernels();                               // the best that this processor can run
const CodecTable* const* codec_tables(int* num_tables);          // all that it can run; the first is portable

}  // namespace syncline
