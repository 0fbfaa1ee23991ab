// Element-wise arithmetic over the buffers of several ranks.
//
// Every element is folded from the left, in the order of `inputs`, with no contraction and no
// reassociation, so its value depends neither on its position nor on the width of the vectors.
// 16-bit floats are added in float32 and rounded once, to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace syncline {

// out[i] = inputs[0][i] op inputs[1][i] op ...; mean divides the sum by num_inputs (integers truncate).
// `out` may be one of the inputs, but must not overlap any of them otherwise. Maximum keeps NaN.
// Returns whether all results are finite, which integers are.
bool fold(void* out, const void* const* inputs, int num_inputs, size_t count, DataType, ReduceOp);

// out[i] = in[i] / divisor; `out` may be `in`. Returns whether all results are finite.
bool divide(void* out, const void* in, size_t count, DataType, int divisor);

// The same past the cache, for what is not read again soon; `out` and `in` do not overlap.
bool divide_past_cache(void* out, const void* in, size_t count, DataType, int divisor);

// float32 <-> float16 or bfloat16.
void widen(float* out, const void* in, size_t count, DataType);
void widen_past_cache(float* out, const void* in, size_t count, DataType);
void narrow(void* out, const float* in, size_t count, DataType);
void narrow_past_cache(void* out, const float* in, size_t count, DataType);

// Bytes that do not overlap; null pointers are fine if there are none.
void copy_bytes(void* out, const void* in, size_t bytes);
void copy_past_cache(void* out, const void* in, size_t bytes);

// One set of kernels, compiled for one instruction set.
struct KernelTable {
  bool (*fold)(void* out, const void* const* inputs, int num_inputs, size_t count, DataType, ReduceOp, int divisor);
  bool (*divide)(void* out, const void* in, size_t count, DataType, int divisor);
  bool (*divide_past_cache)(void* out, const void* in, size_t count, DataType, int divisor);
  void (*widen)(float* out, const void* in, size_t count, DataType);
  void (*widen_past_cache)(float* out, const void* in, size_t count, DataType);
  void (*narrow)(void* out, const float* in, size_t count, DataType);
  void (*narrow_past_cache)(void* out, const float* in, size_t count, DataType);
  void (*copy)(void* out, const void* in, size_t bytes);
  void (*copy_past_cache)(void* out, const void* in, size_t bytes);
};

// The sets that this processor can run, the best one last; the first is portable. For tests.
const KernelTable* const* kernel_tables(int* num_tables);

}  // namespace syncline
