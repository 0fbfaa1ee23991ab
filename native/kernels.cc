#include "kernels.h"

#include <array>

namespace syncline {

namespace portable { extern const KernelTable table; }
#if defined(__x86_64__)
namespace avx2 { extern const KernelTable table; }
namespace avx512 { extern const KernelTable table; }
#endif

namespace {

struct Tables {
  std::array<const KernelTable*, 3> usable{&portable::table};
  int num_usable = 1;

  Tables() {
#if defined(__x86_64__)
    // The processor is asked by hand: the loader's own way (ifunc) runs before a sanitizer is ready.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) usable[num_usable++] = &avx2::table;
    if (num_usable == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
      usable[num_usable++] = &avx512::table;
#endif
  }
};

const Tables& tables() {
  static const Tables all;
  return all;
}

const KernelTable& best() {
  static const KernelTable& chosen = *tables().usable[tables().num_usable - 1];
  return chosen;
}

}  // namespace

const KernelTable* const* kernel_tables(int* num_tables) {
  *num_tables = tables().num_usable;
  return tables().usable.data();
}

bool fold(void* out, const void* const* inputs, int num_inputs, size_t count, DataType dtype, ReduceOp op) {
  return best().fold(out, inputs, num_inputs, count, dtype, op, op == ReduceOp::mean ? num_inputs : 1);
}

bool divide(void* out, const void* in, size_t count, DataType dtype, int divisor) {
  return best().divide(out, in, count, dtype, divisor);
}
bool divide_past_cache(void* out, const void* in, size_t count, DataType dtype, int divisor) {
  return best().divide_past_cache(out, in, count, dtype, divisor);
}
void widen(float* out, const void* in, size_t count, DataType dtype) { best().widen(out, in, count, dtype); }
void widen_past_cache(float* out, const void* in, size_t count, DataType dtype) {
  best().widen_past_cache(out, in, count, dtype);
}
void narrow(void* out, const float* in, size_t count, DataType dtype) { best().narrow(out, in, count, dtype); }
void narrow_past_cache(void* out, const float* in, size_t count, DataType dtype) {
  best().narrow_past_cache(out, in, count, dtype);
}
void copy_bytes(void* out, const void* in, size_t bytes) { best().copy(out, in, bytes); }
void copy_past_cache(void* out, const void* in, size_t bytes) { best().copy_past_cache(out, in, bytes); }

}  // namespace syncline
