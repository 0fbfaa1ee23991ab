// native_tests [text]: runs every registered test, or those whose name contains the text.

#include <cstdio>
#include <exception>

#include "check.h"

static bool passes(const syncline::tests::Test& test) {
    try {
        test.body();
        return true;
    } catch (const std::exception& error) {
        std::printf("FAILED %s\n  %s\n", test.name.c_str(), error.what());
        return false;
    }
}

int main(int argc, char** argv) {
    const std::string wanted = argc > 1 ? argv[1] : "";
    int passed = 0, failed = 0;
    for (const auto& test : syncline::tests::registry()) {
        if (test.name.find(wanted) == std::string::npos) continue;
        ++(passes(test) ? passed : failed);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
