// Buffers of float32 to 16-bit floats and back. Large ones go past the cache, which they would not stay in.
#pragma once

#include <cstddef>

#include "types.h"

namespace syncline {

void narrow_buffer(void* out, const float* in, size_t count, DataType);
void narrow_saturated(void* out, const float* in, size_t count, DataType);  // the largest number instead of infinity
bool widen_buffer(float* out, const void* in, size_t count, DataType);  // whether all of it is finite

}  // namespace syncline
