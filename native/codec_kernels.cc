#include "codec_kernels.h"

#include "kernels.h"

namespace syncline {

namespace portable { extern const CodecTable codec_table; }
#if defined(__x86_64__)
namespace avx2 { extern const CodecTable codec_table; }
namespace avx512 { extern const CodecTable codec_table; }
#endif

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
