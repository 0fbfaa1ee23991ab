// The kernels, compiled once per instruction set (kernels_portable.cc, kernels_avx2.cc, ...) into
// namespace SYNCLINE_KERNELS. Plain loops that the compiler vectorises; intrinsics only where it
// cannot (float16). Nothing here may be an inline function shared with other files: the linker would
// keep one copy, perhaps the one this processor cannot run.
#include <cstring>

#include "kernels.h"
#include "streaming.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace syncline {
namespace SYNCLINE_KERNELS {
namespace {

// A tile of partial results stays in the first-level cache.
constexpr size_t tile = 1024;
constexpr int inputs_per_pass = 4;

struct Sum {
  template <class T>
  static T combine(T a, T b) {
    return a + b;
  }
  // Integers wrap, as everywhere; in C++ only unsigned ones may.
  static int32_t combine(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
  static int64_t combine(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
};

struct Max {
  template <class T>
  static T combine(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

template <class T, class Op, int Inputs>
void pass(T* out, const T* const* in, size_t count) {
  const T* a = in[0];
  const T* b = in[Inputs > 1 ? 1 : 0];
  const T* c = in[Inputs > 2 ? 2 : 0];
  const T* d = in[Inputs > 3 ? 3 : 0];
  // In place is safe: an element is read before it is written, and no other element depends on it.
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    T value = a[i];
    if constexpr (Inputs > 1) value = Op::combine(value, b[i]);
    if constexpr (Inputs > 2) value = Op::combine(value, c[i]);
    if constexpr (Inputs > 3) value = Op::combine(value, d[i]);
    out[i] = value;
  }
}

template <class T, class Op>
void passes(T* out, const T* const* in, int num_inputs, size_t count) {
  switch (num_inputs) {
    case 1: return pass<T, Op, 1>(out, in, count);
    case 2: return pass<T, Op, 2>(out, in, count);
    case 3: return pass<T, Op, 3>(out, in, count);
    default: return pass<T, Op, 4>(out, in, count);
  }
}

template <class T>
void divide_all(T* out, const T* in, size_t count, int divisor) {
  const T by = static_cast<T>(divisor);
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) out[i] = in[i] / by;
}

// Infinity and NaN have all bits of the exponent set.
template <class T, class Bits>
bool lack(const T* data, size_t count, Bits exponent) {
  static_assert(sizeof(T) == sizeof(Bits));
  Bits found = 0;
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + i, sizeof bits);
    found |= (bits & exponent) == exponent ? exponent : Bits{0};
  }
  return found == 0;
}

bool are_finite(const float* data, size_t count) { return lack(data, count, uint32_t{0x7f800000}); }
bool are_finite(const double* data, size_t count) { return lack(data, count, uint64_t{0x7ff0000000000000}); }
bool are_finite(const int32_t*, size_t) { return true; }
bool are_finite(const int64_t*, size_t) { return true; }

template <class T>
void take_inputs(const T** operands, const void* const* inputs, int how_many, size_t at) {
  for (int k = 0; k < how_many; ++k) operands[k] = static_cast<const T*>(inputs[k]) + at;
}

// Four inputs in the first pass, then the partial result and three more at a time. The partial result
// is not kept in `out`, which may be an input that has yet to be read.
template <class T, class Op>
void fold_tile(T* out, const void* const* inputs, int num_inputs, size_t at, size_t count) {
  alignas(64) T partial[tile];
  const T* operands[inputs_per_pass];
  int taken = num_inputs < inputs_per_pass ? num_inputs : inputs_per_pass;
  take_inputs(operands, inputs, taken, at);
  passes<T, Op>(taken == num_inputs ? out : partial, operands, taken, count);
  while (taken < num_inputs) {
    const int left = num_inputs - taken;
    const int now = left < inputs_per_pass - 1 ? left : inputs_per_pass - 1;
    operands[0] = partial;
    take_inputs(operands + 1, inputs + taken, now, at);
    taken += now;
    passes<T, Op>(taken == num_inputs ? out : partial, operands, now + 1, count);
  }
}

template <class T, class Op>
bool fold_wide(T* out, const void* const* inputs, int num_inputs, size_t count, int divisor) {
  bool finite = true;
  for (size_t at = 0; at < count; at += tile) {
    const size_t now = count - at < tile ? count - at : tile;
    fold_tile<T, Op>(out + at, inputs, num_inputs, at, now);
    if (divisor != 1) divide_all(out + at, out + at, now, divisor);
    finite &= are_finite(out + at, now);
  }
  return finite;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Bfloat16 {
  static constexpr uint16_t exponent = 0x7f80;
  static float widen(uint16_t half) { return float_of(uint32_t(half) << 16); }

  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
  }

  static size_t widen_some(float*, const uint16_t*, size_t) { return 0; }
  static size_t narrow_some(uint16_t*, const float*, size_t) { return 0; }
};

struct Float16 {
  static constexpr uint16_t exponent = 0x7c00;
  // Shift the fields into place and let a multiplication by 2^112 move the exponent, which also
  // normalises subnormal numbers; infinity and NaN need their exponent put back.
  static float widen(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t rest = uint32_t(half & 0x7fff) << 13;
    const uint32_t finite = bits_of(float_of(rest) * float_of(0x77800000));
    const uint32_t quiet = rest > 0x0f800000 ? 0x400000 : 0;
    return float_of(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 | quiet : finite));
  }

  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t size = bits & 0x7fffffff;
    // Adding 0.5 makes the float unit itself round a subnormal result at the right bit.
    const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    const uint32_t normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t finite = size < 0x38800000 ? subnormal : normal;
    const uint32_t nan = 0x7e00 | ((size >> 13) & 0x3ff);
    const uint32_t number = size >= 0x47800000 ? 0x7c00 : finite;
    return uint16_t(((bits >> 16) & 0x8000) | (size > 0x7f800000 ? nan : number));
  }

#if defined(__F16C__)
  static size_t widen_some(float* out, const uint16_t* in, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
    return i;
  }
  static size_t narrow_some(uint16_t* out, const float* in, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
    }
    return i;
  }
#else
  static size_t widen_some(float*, const uint16_t*, size_t) { return 0; }
  static size_t narrow_some(uint16_t*, const float*, size_t) { return 0; }
#endif
};

template <class Half>
void widen_all(float* out, const uint16_t* in, size_t count) {
  for (size_t i = Half::widen_some(out, in, count); i < count; ++i) out[i] = Half::widen(in[i]);
}

template <class Half>
void narrow_all(uint16_t* out, const float* in, size_t count) {
  for (size_t i = Half::narrow_some(out, in, count); i < count; ++i) out[i] = Half::narrow(in[i]);
}

template <class Half, class Op>
bool fold_half(uint16_t* out, const void* const* inputs, int num_inputs, size_t count, int divisor) {
  alignas(64) float partial[tile];
  alignas(64) float next[tile];
  const float* operands[2] = {partial, next};
  bool finite = true;
  for (size_t at = 0; at < count; at += tile) {
    const size_t now = count - at < tile ? count - at : tile;
    widen_all<Half>(partial, static_cast<const uint16_t*>(inputs[0]) + at, now);
    for (int k = 1; k < num_inputs; ++k) {
      widen_all<Half>(next, static_cast<const uint16_t*>(inputs[k]) + at, now);
      pass<float, Op, 2>(partial, operands, now);
    }
    if (divisor != 1) divide_all(partial, partial, now, divisor);
    narrow_all<Half>(out + at, partial, now);
    finite &= lack(out + at, now, Half::exponent);
  }
  return finite;
}

template <class Op>
bool fold_with(void* out, const void* const* inputs, int num_inputs, size_t count, DataType dtype, int divisor) {
  switch (dtype) {
    case DataType::float32: return fold_wide<float, Op>(static_cast<float*>(out), inputs, num_inputs, count, divisor);
    case DataType::float64: return fold_wide<double, Op>(static_cast<double*>(out), inputs, num_inputs, count, divisor);
    case DataType::int32: return fold_wide<int32_t, Op>(static_cast<int32_t*>(out), inputs, num_inputs, count, divisor);
    case DataType::int64: return fold_wide<int64_t, Op>(static_cast<int64_t*>(out), inputs, num_inputs, count, divisor);
    case DataType::float16:
      return fold_half<Float16, Op>(static_cast<uint16_t*>(out), inputs, num_inputs, count, divisor);
    case DataType::bfloat16:
      return fold_half<Bfloat16, Op>(static_cast<uint16_t*>(out), inputs, num_inputs, count, divisor);
    case DataType::byte: break;
  }
  return true;
}

bool fold(void* out, const void* const* inputs, int num_inputs, size_t count, DataType dtype, ReduceOp op,
          int divisor) {
  if (op == ReduceOp::max) return fold_with<Max>(out, inputs, num_inputs, count, dtype, 1);
  return fold_with<Sum>(out, inputs, num_inputs, count, dtype, divisor);
}

template <class T>
bool divide_tiles(void* out, const void* in, size_t count, int divisor) {
  bool finite = true;
  for (size_t at = 0; at < count; at += tile) {
    T* here = static_cast<T*>(out) + at;
    const size_t now = count - at < tile ? count - at : tile;
    divide_all(here, static_cast<const T*>(in) + at, now, divisor);
    finite &= are_finite(here, now);
  }
  return finite;
}

bool divide(void* out, const void* in, size_t count, DataType dtype, int divisor) {
  switch (dtype) {
    case DataType::float32: return divide_tiles<float>(out, in, count, divisor);
    case DataType::float64: return divide_tiles<double>(out, in, count, divisor);
    case DataType::int32: return divide_tiles<int32_t>(out, in, count, divisor);
    case DataType::int64: return divide_tiles<int64_t>(out, in, count, divisor);
    default: return true;
  }
}

void stream(void* out, const void* in, size_t bytes) {
  auto* to = static_cast<uint8_t*>(out);
  const auto* from = static_cast<const uint8_t*>(in);
  const size_t before_line = up_to_line(to);
  size_t i = before_line < bytes ? before_line : bytes;
  std::memcpy(to, from, i);
  for (; i + line_bytes <= bytes; i += line_bytes) stream_line(to + i, from + i);
  std::memcpy(to + i, from + i, bytes - i);
}

void copy_past_cache(void* out, const void* in, size_t bytes) {
  if (!bytes) return;
  stream(out, in, bytes);
  finish_streaming();
}

// Tiles are made in the first-level cache, by `make(tile, at, how_many)`; all but the first begin where a line does.
template <class T, class Make>
void stream_tiles(T* out, size_t count, const Make& make) {
  alignas(line_bytes) T made[tile];
  for (size_t at = 0, now; at < count; at += now) {
    const size_t before_line = up_to_line(out + at);
    now = before_line ? before_line : tile;
    if (now > count - at) now = count - at;
    make(made, at, now);
    stream(out + at, made, now * sizeof(T));
  }
  finish_streaming();
}

template <class T>
bool divide_tiles_past_cache(T* out, const T* in, size_t count, int divisor) {
  bool finite = true;
  stream_tiles(out, count, [&](T* quotients, size_t at, size_t now) {
    divide_all(quotients, in + at, now, divisor);
    finite &= are_finite(quotients, now);
  });
  return finite;
}

bool divide_past_cache(void* out, const void* in, size_t count, DataType dtype, int divisor) {
  switch (dtype) {
    case DataType::float32:
      return divide_tiles_past_cache(static_cast<float*>(out), static_cast<const float*>(in), count, divisor);
    case DataType::float64:
      return divide_tiles_past_cache(static_cast<double*>(out), static_cast<const double*>(in), count, divisor);
    default: return SYNCLINE_KERNELS::divide(out, in, count, dtype, divisor);
  }
}

void widen(float* out, const void* in, size_t count, DataType dtype) {
  const auto* halves = static_cast<const uint16_t*>(in);
  dtype == DataType::float16 ? widen_all<Float16>(out, halves, count) : widen_all<Bfloat16>(out, halves, count);
}

void narrow(void* out, const float* in, size_t count, DataType dtype) {
  auto* halves = static_cast<uint16_t*>(out);
  dtype == DataType::float16 ? narrow_all<Float16>(halves, in, count) : narrow_all<Bfloat16>(halves, in, count);
}

void widen_past_cache(float* out, const void* in, size_t count, DataType dtype) {
  const auto* halves = static_cast<const uint16_t*>(in);
  stream_tiles(out, count, [&](float* made, size_t at, size_t now) {
    SYNCLINE_KERNELS::widen(made, halves + at, now, dtype);
  });
}

void narrow_past_cache(void* out, const float* in, size_t count, DataType dtype) {
  auto* halves = static_cast<uint16_t*>(out);
  stream_tiles(halves, count, [&](uint16_t* made, size_t at, size_t now) {
    SYNCLINE_KERNELS::narrow(made, in + at, now, dtype);
  });
}

// A plain loop. The C library would use `rep movsb` for these lengths, which on some processors is several times
// slower for unlucky pairs of addresses.
void copy_bytes(void* out, const void* in, size_t bytes) {
  auto* to = static_cast<uint8_t*>(out);
  const auto* from = static_cast<const uint8_t*>(in);
#pragma GCC ivdep
  for (size_t i = 0; i < bytes; ++i) to[i] = from[i];
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {fold,   divide,     divide_past_cache, widen, widen_past_cache,
                           narrow, narrow_past_cache, copy_bytes, copy_past_cache};

}  // namespace SYNCLINE_KERNELS
}  // namespace syncline
