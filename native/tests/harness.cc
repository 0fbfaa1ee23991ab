#include "harness.h"

#include "join.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

namespace syncline::test {

std::vector<Test>& Test::all() {
  static std::vector<Test> tests;
  return tests;
}

Place Place::fresh() {
  static std::atomic<uint64_t> counter{0};
  const uint64_t number = counter.fetch_add(1);
  const uint64_t process = uint64_t(getpid());
  Place place;
  place.address = "@syncline-test-" + std::to_string(process) + "-" + std::to_string(number);
  std::memcpy(place.nonce.data(), &process, 8);
  std::memcpy(place.nonce.data() + 8, &number, 8);
  return place;
}

Settings quick_settings() {
  Settings settings;
  settings.arena_bytes = uint64_t(under_thread_sanitizer ? 64 : 512) << 20;
  settings.deadline_s = 60;
  settings.join_deadline_s = 60;
  return settings;
}

namespace {

bool succeeds(const std::function<void()>& body, const char* who, int rank) {
  try {
    body();
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s %d: %s\n", who, rank, error.what());
  } catch (const Failed&) {
    std::fprintf(stderr, "%s %d failed\n", who, rank);
  }
  return false;
}

}  // namespace

void run_threads(int world, const RankBody& body, const Settings& settings) {
  std::vector<Membership> memberships = join_threads(world, settings);
  std::vector<std::shared_ptr<Arena>> arenas;  // alive until all threads are done
  for (const Membership& membership : memberships) arenas.push_back(membership.arena);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const bool good = succeeds(
          [&] {
            Group group(std::move(memberships[rank]), settings);
            body(group);
            group.close();
          },
          "thread", rank);
      failures += !good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
}

void run_ranks(int world, const RankBody& body, const Settings& settings) {
  if (under_thread_sanitizer) return run_threads(world, body, settings);
  const Place place = Place::fresh();
  const auto children = start_processes(world, [&](int rank) {
    Group group(place.address, rank, world, place.nonce, settings);
    body(group);
    group.close();
  });
  for (const int status : wait_processes(children, 240)) CHECK(status == 0, "(status %d, world %d)", status, world);
}

std::vector<pid_t> start_processes(int world, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(succeeds([&] { body(rank); }, "rank", rank) ? 0 : 1);
    children.push_back(child);
  }
  return children;
}

std::vector<int> wait_processes(const std::vector<pid_t>& children, double limit_s) {
  const double end = now_s() + limit_s;
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (now_s() > end) kill(child, SIGKILL);
      sleep_s(0.0005);
    }
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return statuses;
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

int open_descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

int mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
  }
  return count;
}

}  // namespace syncline::test

int main(int argc, char** argv) {
  int failures = 0, ran = 0;
  for (const auto& test : syncline::test::Test::all()) {
    if (argc > 1 && std::string(test.name).find(argv[1]) == std::string::npos) continue;
    const double start = syncline::test::now_s();
    bool good = true;
    try {
      test.body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      good = false;
    } catch (const syncline::test::Failed&) {
      good = false;
    }
    std::printf("%-4s %6.2f s  %s\n", good ? "ok" : "FAIL", syncline::test::now_s() - start, test.name);
    std::fflush(stdout);
    failures += !good;
    ++ran;
  }
  std::printf("%d passed, %d failed\n", ran - failures, failures);
  return failures != 0;
}
