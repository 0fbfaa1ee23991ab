// The slow, obvious twins of the kernels: one element at a time, in double precision where that is exact.
#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "harness.h"

namespace syncline::test {

constexpr DataType reducible[] = {DataType::float32, DataType::float64, DataType::float16,
                                  DataType::bfloat16, DataType::int32, DataType::int64};
constexpr ReduceOp reductions[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::mean};

inline float twin_widen(uint16_t bits, DataType dtype) {
  const bool half = dtype == DataType::float16;
  const int mantissa_bits = half ? 10 : 7, bias = half ? 15 : 127, top = half ? 31 : 255;
  const int exponent = bits >> mantissa_bits & top;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double value;
  if (exponent == top) value = mantissa ? std::nan("") : INFINITY;
  else if (exponent == 0) value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  else value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return float(bits >> 15 ? -value : value);
}

// Rounds in units of the last place, which std::nearbyint does to even.
inline uint16_t twin_narrow(float value, DataType dtype) {
  const bool half = dtype == DataType::float16;
  const int mantissa_bits = half ? 10 : 7, bias = half ? 15 : 127, top = half ? 31 : 255;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return uint16_t(sign | top << mantissa_bits | 1 << (mantissa_bits - 1));
  if (value == 0) return sign;
  const double size = std::fabs(double(value));
  int exponent = std::isinf(size) ? 1000 : std::ilogb(size);
  exponent = std::max(exponent, 1 - bias);
  if (exponent > bias) return uint16_t(sign | top << mantissa_bits);
  const double units = std::nearbyint(std::ldexp(size, mantissa_bits - exponent));
  // Carries into the exponent by itself when the rounding reaches the next power of two.
  const uint32_t bits = uint32_t(exponent + bias - 1) * (1u << mantissa_bits) + uint32_t(units);
  return uint16_t(sign | std::min<uint32_t>(bits, uint32_t(top) << mantissa_bits));
}

template <class T>
T twin_element(const std::vector<T>& inputs, ReduceOp op) {
  T value = inputs[0];
  for (size_t k = 1; k < inputs.size(); ++k) {
    const T next = inputs[k];
    if (op == ReduceOp::max) value = (value != value || value > next) ? value : next;
    else if constexpr (std::is_integral_v<T>) value = T(std::make_unsigned_t<T>(value) + std::make_unsigned_t<T>(next));
    else value = value + next;
  }
  return op == ReduceOp::mean ? T(value / T(inputs.size())) : value;
}

template <class T>
T load(const void* data, uint64_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* data, uint64_t i, T value) {
  std::memcpy(static_cast<std::byte*>(data) + i * sizeof(T), &value, sizeof(T));
}

template <class T>
void twin_fold_wide(void* out, const std::vector<const void*>& inputs, uint64_t count, ReduceOp op) {
  std::vector<T> operands(inputs.size());
  for (uint64_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < inputs.size(); ++k) operands[k] = load<T>(inputs[k], i);
    store<T>(out, i, twin_element(operands, op));
  }
}

inline void twin_fold(void* out, const std::vector<const void*>& inputs, uint64_t count, DataType dtype, ReduceOp op) {
  if (dtype == DataType::float32) return twin_fold_wide<float>(out, inputs, count, op);
  if (dtype == DataType::float64) return twin_fold_wide<double>(out, inputs, count, op);
  if (dtype == DataType::int32) return twin_fold_wide<int32_t>(out, inputs, count, op);
  if (dtype == DataType::int64) return twin_fold_wide<int64_t>(out, inputs, count, op);
  std::vector<float> operands(inputs.size());
  for (uint64_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < inputs.size(); ++k) operands[k] = twin_widen(load<uint16_t>(inputs[k], i), dtype);
    store<uint16_t>(out, i, twin_narrow(twin_element(operands, op), dtype));
  }
}

constexpr DataType floating[] = {DataType::float32, DataType::float64, DataType::float16, DataType::bfloat16};

inline double twin_value(const void* data, uint64_t i, DataType dtype) {
  if (dtype == DataType::float32) return load<float>(data, i);
  if (dtype == DataType::float64) return load<double>(data, i);
  if (dtype == DataType::int32) return load<int32_t>(data, i);
  if (dtype == DataType::int64) return double(load<int64_t>(data, i));
  return twin_widen(load<uint16_t>(data, i), dtype);
}

inline bool twin_finite(const void* data, uint64_t count, DataType dtype) {
  for (uint64_t i = 0; i < count; ++i)
    if (!std::isfinite(twin_value(data, i, dtype))) return false;
  return true;
}

inline void set(void* data, uint64_t i, DataType dtype, double value) {
  if (dtype == DataType::float32) return store(data, i, float(value));
  if (dtype == DataType::float64) return store(data, i, value);
  store(data, i, twin_narrow(float(value), dtype));
}

inline double largest(DataType dtype) {
  if (dtype == DataType::float32) return std::numeric_limits<float>::max();
  if (dtype == DataType::float64) return std::numeric_limits<double>::max();
  return dtype == DataType::float16 ? 65504.0 : 0x1.fep127;
}

inline bool is_nan(const void* data, uint64_t i, DataType dtype) {
  if (dtype == DataType::float32) return std::isnan(load<float>(data, i));
  if (dtype == DataType::float64) return std::isnan(load<double>(data, i));
  if (dtype == DataType::float16 || dtype == DataType::bfloat16)
    return std::isnan(twin_widen(load<uint16_t>(data, i), dtype));
  return false;
}

// The first element that differs, or -1. Any NaN equals any other: which one survives an addition is not defined.
inline int64_t first_difference(const void* a, const void* b, uint64_t count, DataType dtype) {
  const size_t size = size_of(dtype);
  if (count == 0 || std::memcmp(a, b, count * size) == 0) return -1;
  for (uint64_t i = 0; i < count; ++i) {
    const bool same = std::memcmp(static_cast<const std::byte*>(a) + i * size, static_cast<const std::byte*>(b) + i * size, size) == 0;
    if (!same && !(is_nan(a, i, dtype) && is_nan(b, i, dtype))) return int64_t(i);
  }
  return -1;
}

// Ordinary numbers of the type, different for every seed.
inline void fill(void* data, uint64_t count, DataType dtype, uint64_t seed) {
  Random random(seed);
  for (uint64_t i = 0; i < count; ++i) {
    const double number = (random.uniform() - 0.5) * 200;
    switch (dtype) {
      case DataType::float32: store<float>(data, i, float(number)); break;
      case DataType::float64: store<double>(data, i, number); break;
      case DataType::int32: store<int32_t>(data, i, int32_t(random.next())); break;
      case DataType::int64: store<int64_t>(data, i, int64_t(random.next())); break;
      case DataType::byte: store<uint8_t>(data, i, uint8_t(random.next())); break;
      case DataType::float16:
      case DataType::bfloat16: store<uint16_t>(data, i, twin_narrow(float(number), dtype)); break;
    }
  }
}

// Any bits at all: infinities, NaN, subnormal numbers, zeros of both signs.
inline void fill_wild(void* data, uint64_t count, DataType dtype, uint64_t seed) {
  fill(data, count, dtype, seed);
  Random random(seed + 77);
  const size_t size = size_of(dtype);
  for (uint64_t i = 0; i < count; ++i) {
    if (random.below(3)) continue;
    uint64_t bits = random.next();
    if (random.below(4) == 0) bits = random.below(2) ? 0 : uint64_t(1) << (8 * size - 1);
    std::memcpy(static_cast<std::byte*>(data) + i * size, &bits, size);
  }
}

}  // namespace syncline::test
