// A test is TEST(name) { ... CHECK(condition); ... } in any .cc file of this folder; main.cc runs them all.
// A failed check throws, so it ends its test and no other.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace syncline::tests {

struct Test {
    std::string name;
    void (*body)();
};

inline std::vector<Test>& registry() {
    static std::vector<Test> tests;
    return tests;
}

struct Register {
    Register(const char* name, void (*body)()) { registry().push_back({name, body}); }
};

struct CheckFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void check_equal(const char* file, int line, const char* expression, const A& actual, const B& expected) {
    if (actual == expected) return;
    std::ostringstream message;
    message << expression << ": got " << actual << ", expected " << expected;
    fail(file, line, message.str());
}

}  // namespace syncline::tests

#define TEST(name)                                                  \
    static void name();                                             \
    static const syncline::tests::Register register_##name{#name, name}; \
    static void name()

#define CHECK(condition) \
    do { if (!(condition)) syncline::tests::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); } while (false)

#define CHECK_EQUAL(actual, expected) \
    syncline::tests::check_equal(__FILE__, __LINE__, #actual, (actual), (expected))
