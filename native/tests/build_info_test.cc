#include "../build_info.h"

#include <set>

#include "check.h"

TEST(build_info_names_the_compiler_and_the_standard) {
    const auto info = syncline::build_info();
    CHECK(!info.compiler.empty());
    CHECK_EQUAL(info.cpp_standard, "C++20");
}

TEST(build_info_names_a_known_simd_level) {
    const std::set<std::string> known{"avx512", "avx2", "neon", "portable"};
    CHECK(known.contains(syncline::build_info().simd));
}
