// The kernels of codecs, compiled once per instruction set, after kernels_body.h, whose Bfloat16 they use. Plain loops that
// the compiler vectorises.
#include <cmath>
#include <cstring>

#include "codec_kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace syncline {
namespace SYNCLINE_KERNELS {
namespace {

constexpr size_t lanes = 16;

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

float largest_magnitude(const float* values, size_t count) {
  float largest[lanes] = {};
  size_t i = 0;
  for (; i + lanes <= count; i += lanes)
    for (size_t k = 0; k < lanes; ++k) {
      const float size = std::fabs(values[i + k]);
      largest[k] = size > largest[k] ? size : largest[k];
    }
  float all = 0;
  for (size_t k = 0; k < lanes; ++k) all = largest[k] > all ? largest[k] : all;
  for (; i < count; ++i) all = std::fabs(values[i]) > all ? std::fabs(values[i]) : all;
  return all;
}

// Adding and taking away 1.5 * 2^23 rounds to nearest, ties to even, as the float unit does it.
float nearest(float value) {
  constexpr float magic = 12582912.0f;
  return (value + magic) - magic;
}

void codes_of(int8_t* codes, const float* values, const float* noise, float scale, float levels, size_t count) {
  if (noise == nullptr) {
    for (size_t i = 0; i < count; ++i) {
      const float whole = nearest(values[i] / scale);
      codes[i] = int8_t(int32_t(whole > levels ? levels : whole < -levels ? -levels : whole));
    }
  } else {
    for (size_t i = 0; i < count; ++i) {
      const float whole = std::floor(values[i] / scale + noise[i]);
      codes[i] = int8_t(int32_t(whole > levels ? levels : whole < -levels ? -levels : whole));
    }
  }
}

void pack_halves(uint8_t* bytes, const int8_t* codes, size_t count) {
  const size_t pairs = count / 2;
  for (size_t i = 0; i < pairs; ++i) bytes[i] = uint8_t((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
  if (count % 2) bytes[pairs] = uint8_t(codes[count - 1] & 15);
}

float value_of_half(unsigned half) { return float(int((half & 15) ^ 8) - 8); }

void unpack_halves(float* out, const uint8_t* bytes, size_t count, float scale) {
  const size_t pairs = count / 2;
  for (size_t i = 0; i < pairs; ++i) {
    out[2 * i] = value_of_half(bytes[i]) * scale;
    out[2 * i + 1] = value_of_half(bytes[i] >> 4) * scale;
  }
  if (count % 2) out[count - 1] = value_of_half(bytes[pairs]) * scale;
}

void quantize(float* scales, uint8_t* codes, const float* values, const float* noise, size_t count, size_t block, int bits) {
  const float levels = bits == 8 ? 127.0f : 7.0f;
  constexpr size_t chunk = 512;
  int8_t some[chunk];
  for (size_t at = 0, number = 0; at < count; at += block, ++number) {
    const size_t now = smaller(block, count - at);
    const float scale = largest_magnitude(values + at, now) / levels;
    scales[number] = scale > 0 ? scale : 1.0f;
    if (bits == 8) {
      codes_of(reinterpret_cast<int8_t*>(codes + at), values + at, noise ? noise + at : nullptr, scales[number], levels, now);
      continue;
    }
    for (size_t from = 0; from < now; from += chunk) {
      const size_t part = smaller(chunk, now - from);
      codes_of(some, values + at + from, noise ? noise + at + from : nullptr, scales[number], levels, part);
      pack_halves(codes + (at + from) / 2, some, part);
    }
  }
}

// Writes what `decode(to, at, count)` makes of a message, or adds or takes it away past a buffer that stays in the cache.
template <typename Decode>
void apply(float* out, size_t count, How how, Decode decode) {
  if (how == How::write) return decode(out, 0, count);
  constexpr size_t room = 4096;
  float some[room];
  for (size_t at = 0; at < count; at += room) {
    const size_t now = smaller(room, count - at);
    decode(some, at, now);
    if (how == How::add)
      for (size_t i = 0; i < now; ++i) out[at + i] += some[i];
    else
      for (size_t i = 0; i < now; ++i) out[at + i] -= some[i];
  }
}

// Calls `body(from, to, number)` for every block, or part of one, in `at` to `at + count`.
template <typename Body>
void for_each_block(size_t at, size_t count, size_t block, Body body) {
  for (const size_t end = at + count; at < end;) {
    const size_t next = smaller(end, (at / block + 1) * block);
    body(at, next, at / block);
    at = next;
  }
}

void dequantize(float* out, const float* scales, const uint8_t* codes, size_t count, size_t block, int bits, How how) {
  apply(out, count, how, [=](float* to, size_t at, size_t now) {
    for_each_block(at, now, block, [=](size_t from, size_t end, size_t number) {
      const float scale = scales[number];
      if (bits == 8) {
        const auto* whole = reinterpret_cast<const int8_t*>(codes);
        for (size_t i = from; i < end; ++i) to[i - at] = float(whole[i]) * scale;
        return;
      }
      unpack_halves(to + (from - at), codes + from / 2, end - from, scale);
    });
  });
}

float sum_of_magnitudes(const float* values, size_t count) {
  float sums[lanes] = {};
  size_t i = 0;
  for (; i + lanes <= count; i += lanes)
    for (size_t k = 0; k < lanes; ++k) sums[k] += std::fabs(values[i + k]);
  for (size_t k = 0; i < count; ++i, ++k) sums[k] += std::fabs(values[i]);
  float total = 0;
  for (size_t k = 0; k < lanes; ++k) total += sums[k];
  return total;
}

uint8_t eight_signs(const float* values) {
#if defined(__AVX2__)
  return uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(values), _mm256_setzero_ps(), _CMP_GE_OQ)));
#else
  unsigned bits = 0;
  for (unsigned k = 0; k < 8; ++k) bits |= unsigned(values[k] >= 0) << k;
  return uint8_t(bits);
#endif
}

// What is too large becomes the largest one: a sum of magnitudes may be infinite where none of them is.
uint16_t half_of(float magnitude) {
  constexpr float most = 0x1.fep127f;
  return Bfloat16::narrow(magnitude > most ? most : magnitude);
}

void pack_signs(uint16_t* scales, uint8_t* bits, const float* values, size_t count, size_t block) {
  for (size_t at = 0, number = 0; at < count; at += block, ++number) {
    const size_t now = smaller(block, count - at);
    scales[number] = half_of(sum_of_magnitudes(values + at, now) / float(now));
  }
  size_t i = 0;
  for (; i + 8 <= count; i += 8) bits[i / 8] = eight_signs(values + i);
  if (i < count) {
    unsigned last = 0;
    for (size_t k = 0; i + k < count; ++k) last |= unsigned(values[i + k] >= 0) << k;
    bits[i / 8] = uint8_t(last);
  }
}

// The sign bit of the scale is set where the sign is not: no branch, no multiplication. Blocks are multiples of eight.
void unpack_signs(float* out, const uint16_t* scales, const uint8_t* bits, size_t count, size_t block, How how) {
  apply(out, count, how, [=](float* to, size_t at, size_t now) {
    for_each_block(at, now, block, [=](size_t from, size_t end, size_t number) {
      const uint32_t scale = bits_of(Bfloat16::widen(scales[number]));
      size_t i = from;
      for (; i + 8 <= end; i += 8) {
        const uint32_t eight = ~uint32_t(bits[i / 8]);
        uint32_t made[8];
        for (unsigned k = 0; k < 8; ++k) made[k] = scale ^ ((eight >> k & 1u) << 31);
        std::memcpy(to + (i - at), made, sizeof made);
      }
      for (; i < end; ++i) {
        const uint32_t made = scale ^ ((~uint32_t(bits[i / 8]) >> (i % 8) & 1u) << 31);
        std::memcpy(to + (i - at), &made, sizeof made);
      }
    });
  });
}

uint32_t magnitude_bits(const float* value) {
  uint32_t bits;
  std::memcpy(&bits, value, sizeof bits);
  return bits & 0x7fffffffu;
}

size_t collect(uint32_t* positions, size_t room, const float* values, size_t count, uint32_t least) {
  size_t found = 0, i = 0;
#if defined(__AVX2__)
  const __m256i limit = _mm256_set1_epi32(int32_t(least) - 1);
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const auto compare = [&](size_t at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + at));
    return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), limit))));
  };
  for (; i + 32 <= count && found + 32 <= room; i += 32) {
    uint32_t mask = compare(i) | compare(i + 8) << 8 | compare(i + 16) << 16 | compare(i + 24) << 24;
    for (; mask != 0; mask &= mask - 1) positions[found++] = uint32_t(i) + uint32_t(__builtin_ctz(mask));
  }
#endif
  for (; i < count && found < room; ++i)
    if (magnitude_bits(values + i) >= least) positions[found++] = uint32_t(i);
  return found;
}

// Magnitudes are compared as integers: infinity is larger than all numbers, and NaN than infinity.
float add_residual(float* out, const float* gradient, const float* residual, size_t count) {
  uint32_t largest[lanes] = {};
  const auto put = [&](size_t i, size_t k) {
    const float sum = residual == nullptr ? gradient[i] : gradient[i] + residual[i];
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    bits &= 0x7fffffffu;
    largest[k] = bits > largest[k] ? bits : largest[k];
    out[i] = sum;
  };
  size_t i = 0;
  if (residual == nullptr) {
    for (; i + lanes <= count; i += lanes)
      for (size_t k = 0; k < lanes; ++k) {
        uint32_t bits;
        std::memcpy(&bits, gradient + i + k, sizeof bits);
        bits &= 0x7fffffffu;
        largest[k] = bits > largest[k] ? bits : largest[k];
      }
    if (out != gradient) std::memcpy(out, gradient, i * sizeof(float));
  } else {
    for (; i + lanes <= count; i += lanes)
      for (size_t k = 0; k < lanes; ++k) put(i + k, k);
  }
  for (; i < count; ++i) put(i, 0);
  uint32_t all = 0;
  for (size_t k = 0; k < lanes; ++k) all = largest[k] > all ? largest[k] : all;
  float result;
  std::memcpy(&result, &all, sizeof result);
  return result;
}

}  // namespace

extern const CodecTable codec_table;
const CodecTable codec_table = {quantize, dequantize, pack_signs, unpack_signs, add_residual, collect};

}  // namespace SYNCLINE_KERNELS
}  // namespace syncline
