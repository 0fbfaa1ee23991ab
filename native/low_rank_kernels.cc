#include "low_rank_kernels.h"

#include "kernels.h"

namespace syncline {

namespace portable { extern const LowRankTable low_rank_table; }
#if defined(__x86_64__)
namespace avx2 { extern const LowRankTable low_rank_table; }
namespace avx512 { extern const LowRankTable low_rank_table; }
#endif

const LowRankTable* const* low_rank_tables(int* num_tables) {
  static const LowRankTable* const all[] = {
      &portable::low_rank_table,
#if defined(__x86_64__)
      &avx2::low_rank_table, &avx512::low_rank_table,
#endif
  };
  kernel_tables(num_tables);
  return all;
}

const LowRankTable& low_rank_kernels() {
  int num_tables = 0;
  const LowRankTable* const* tables = low_rank_tables(&num_tables);
  static const LowRankTable& best = *tables[num_tables - 1];
  return best;
}

}  // namespace syncline
