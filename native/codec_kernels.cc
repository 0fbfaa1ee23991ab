#include "codec_kernels.h"

#include "kernels.h"

namespace syncline {

namespace portable { extern const CodecTable codec_table; }
#if defined(__x86_64__)
namespace avx2 { extern const CodecTable codec_table; }
namespace avx512 { extern const CodecTable codec_table; }
#endif

namespace {

constexpr size_t values_at_a_time = 8192;  // of 32 KiB

// Calls `body(at, how_many)` for all values; `at` is a multiple of a block.
template <class Body>
void for_blocks(size_t count, size_t block, const Body& body) {
  const size_t step = block < values_at_a_time ? values_at_a_time / block * block : block;
  for (size_t at = 0; at < count; at += step) body(at, count - at < step ? count - at : step);
}

}  // namespace

void take_quantized(const CodecTable& table, float* scales, uint8_t* codes, float* values, const float* noise,
                    size_t count, size_t block, int bits) {
  for_blocks(count, block, [&](size_t at, size_t now) {
    float* scale = scales + at / block;
    uint8_t* code = codes + at * size_t(bits) / 8;
    table.quantize(scale, code, values + at, noise ? noise + at : nullptr, now, block, bits);
    table.dequantize(values + at, scale, code, now, block, bits, How::subtract);
  });
}

void take_signs(const CodecTable& table, uint16_t* scales, uint8_t* bits, float* values, size_t count, size_t block) {
  for_blocks(count, block, [&](size_t at, size_t now) {
    table.pack_signs(scales + at / block, bits + at / 8, values + at, now, block);
    table.unpack_signs(values + at, scales + at / block, bits + at / 8, now, block, How::subtract);
  });
}

const CodecTable* const* codec_tables(int* num_tables) {
  static const CodecTable* const all[] = {
      &portable::codec_table,
#if defined(__x86_64__)
      &avx2::codec_table, &avx512::codec_table,
#endif
  };
  kernel_tables(num_tables);
  return all;
}

const CodecTable& codec_kernels() {
  int num_tables = 0;
  const CodecTable* const* tables = codec_tables(&num_tables);
  static const CodecTable& best = *tables[num_tables - 1];
  return best;
}

}  // namespace syncline
