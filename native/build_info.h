// How this library was built, and what the processor it runs on offers.
#pragma once

#include <string>

namespace syncline {

struct BuildInfo {
    std::string compiler;      // "gcc 12.2.0"
    std::string cpp_standard;  // "C++20"
    std::string simd;          // the widest level found at run time: "avx512", "avx2", "neon" or "portable"
};

BuildInfo build_info();

}  // namespace syncline
