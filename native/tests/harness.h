// A test is a function; a rank is a process, or a thread where a sanitizer has to see all of them.
#pragma once

#include <sys/types.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group.h"

namespace syncline::test {

#if defined(__SANITIZE_THREAD__)
constexpr bool under_thread_sanitizer = true;
#else
constexpr bool under_thread_sanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool under_address_sanitizer = true;
#else
constexpr bool under_address_sanitizer = false;
#endif

struct Failed {};

#define CHECK(condition, ...)                                                                   \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed ", __FILE__, __LINE__, #condition);         \
      std::fprintf(stderr, " " __VA_ARGS__);                                                    \
      std::fprintf(stderr, "\n");                                                               \
      throw syncline::test::Failed{};                                                           \
    }                                                                                           \
  } while (false)

struct Test {
  const char* name;
  void (*body)();
  static std::vector<Test>& all();
  Test(const char* name, void (*body)()) : name(name), body(body) { all().push_back(*this); }
  Test(const Test&) = default;
};

#define TEST(name)                                          \
  static void name();                                       \
  static const syncline::test::Test test_##name{#name, name}; \
  static void name()

// A meeting place that no other test uses.
struct Place {
  std::string address;
  Nonce nonce;
  static Place fresh();
};

Settings quick_settings();  // a small arena and a short deadline

using RankBody = std::function<void(Group&)>;

// Runs the body on every rank of a fresh group; fails if any rank fails.
void run_ranks(int world, const RankBody&, const Settings& = quick_settings());
void run_threads(int world, const RankBody&, const Settings& = quick_settings());

// Starts one child per rank without making groups; returns their process numbers.
std::vector<pid_t> start_processes(int world, const std::function<void(int rank)>& body);
// Exit status per child (-signal if killed); kills those that outlive the limit.
std::vector<int> wait_processes(const std::vector<pid_t>&, double limit_s = 60);

double now_s();
void sleep_s(double seconds);
int open_descriptors();
int mappings();

// A deterministic stream of numbers, different for every seed.
struct Random {
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15 + 0x1234567) { next(); }
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  uint64_t below(uint64_t limit) { return next() % limit; }
  uint64_t state;
};

// Memory of a rank for one test: in shared memory or not, and possibly one element off alignment.
struct Memory {
  Memory(Group& group, bool shared, uint64_t bytes, uint64_t shift = 0)
      : buffer(shared ? group.buffer(bytes + shift + 1) : nullptr), own(shared ? 0 : bytes + shift + 1), shift(shift) {}
  void* data() { return (buffer ? static_cast<std::byte*>(buffer->data()) : own.data()) + shift; }
  std::shared_ptr<Buffer> buffer;
  std::vector<std::byte> own;
  uint64_t shift;
};

}  // namespace syncline::test
