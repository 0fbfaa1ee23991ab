// The border between the native core and Python, and the only file that knows both.
// Arguments are named, the GIL is released around work, and src/syncline/_native.pyi mirrors this file.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "build_info.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The native core of syncline.";

    m.def("build_info", [] {
        const auto info = syncline::build_info();
        nb::dict result;
        result["compiler"] = info.compiler;
        result["cpp_standard"] = info.cpp_standard;
        result["simd"] = info.simd;
        return result;
    }, nb::sig("def build_info() -> dict[str, str]"));
}
