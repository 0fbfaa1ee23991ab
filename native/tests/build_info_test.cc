#include "build_info.h"

#include <set>

#include "harness.h"

using namespace syncline;

TEST(build_info_names_the_compiler_and_the_standard) {
  CHECK(!build_info().compiler.empty());
  CHECK(build_info().cpp_standard == "C++20");
}

TEST(build_info_names_a_known_simd_level) {
  const std::set<std::string> known{"avx512", "avx2", "neon", "portable"};
  CHECK(known.contains(build_info().simd));
}
