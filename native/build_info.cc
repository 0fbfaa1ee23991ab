#include "build_info.h"

namespace syncline {
namespace {

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

std::string cpp_standard() { return "C++" + std::to_string(__cplusplus / 100 % 100); }

std::string simd_level() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return "avx512";
    if (__builtin_cpu_supports("avx2")) return "avx2";
#elif defined(__aarch64__)
    return "neon";
#endif
    return "portable";
}

}  // namespace

BuildInfo build_info() { return {compiler(), cpp_standard(), simd_level()}; }

}  // namespace syncline
