#include "join.h"

#include <dirent.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "local_socket.h"

using namespace syncline;
using namespace syncline::test;

namespace {

Settings short_join() {
  Settings settings = quick_settings();
  settings.join_deadline_s = 3;
  return settings;
}

std::string join_error(const Place& place, int rank, int world, const Settings& settings) {
  try {
    Group group(place.address, rank, world, place.nonce, settings);
  } catch (const JoinError& error) {
    return error.what();
  }
  return "";
}

// Every rank must fail with a text that contains `expected`.
void check_refused(int processes, const std::string& expected, const std::function<std::string(int)>& attempt) {
  const auto children = start_processes(processes, [&](int rank) {
    const std::string text = attempt(rank);
    CHECK(text.find(expected) != std::string::npos, "rank %d: %s", rank, text.c_str());
  });
  for (const int status : wait_processes(children)) CHECK(status == 0);
}

}  // namespace

TEST(a_path_is_as_good_as_an_abstract_name) {
  if (under_thread_sanitizer) return;
  Place place = Place::fresh();
  place.address = "/tmp/syncline-test-" + std::to_string(getpid());
  { LocalListener listener(place.address); }
  for (int turn = 0; turn < 2; ++turn) {
    const auto children = start_processes(3, [&](int rank) {
      Group group(place.address, rank, 3, place.nonce, short_join());
      group.barrier();
    });
    for (const int status : wait_processes(children)) CHECK(status == 0);
  }
  struct stat info;
  CHECK(stat(place.address.c_str(), &info) != 0);
}

TEST(a_stale_path_of_a_killed_job_is_taken_over) {
  if (under_thread_sanitizer) return;
  Place place = Place::fresh();
  place.address = "/tmp/syncline-stale-" + std::to_string(getpid());
  const auto killed = start_processes(1, [&](int) { LocalListener listener(place.address); _exit(0); });
  wait_processes(killed);
  struct stat info;
  CHECK(stat(place.address.c_str(), &info) == 0);
  const auto children = start_processes(2, [&](int rank) {
    Group group(place.address, rank, 2, place.nonce, short_join());
    group.barrier();
  });
  for (const int status : wait_processes(children)) CHECK(status == 0);
}

TEST(mistakes_are_told_to_every_rank) {
  if (under_thread_sanitizer) return;
  Place place = Place::fresh();
  check_refused(2, "expects", [&](int rank) { return join_error(place, rank, rank == 0 ? 2 : 3, short_join()); });
  place = Place::fresh();
  check_refused(3, "two processes say that they are rank 1",
                [&](int rank) { return join_error(place, std::min(rank, 1), 3, short_join()); });
  place = Place::fresh();
  check_refused(2, "sizes", [&](int rank) {
    Settings settings = short_join();
    settings.slot_bytes = rank == 0 ? 4096 : 8192;
    return join_error(place, rank, 2, settings);
  });
}

TEST(a_missing_rank_is_named) {
  const Place place = Place::fresh();
  Settings settings = short_join();
  settings.join_deadline_s = 0.3;
  CHECK(join_error(place, 0, 3, settings).find("ranks 1, 2 did not appear") != std::string::npos);
  CHECK(join_error(place, 1, 3, settings).find("rank 0 did not listen") != std::string::npos);
  CHECK(join_error(place, 5, 3, settings).find("there is no rank 5") != std::string::npos);
  CHECK(join_error(place, 0, 65, settings).find("not between 1 and 64") != std::string::npos);
}

TEST(a_stranger_is_turned_away_and_the_group_still_forms) {
  if (under_thread_sanitizer) return;
  const Place place = Place::fresh();
  Place stranger = place;
  stranger.nonce[0] ^= 1;
  const auto children = start_processes(4, [&](int rank) {
    if (rank == 2) {
      const std::string text = join_error(stranger, 1, 2, short_join());
      CHECK(text.find("another job") != std::string::npos, "%s", text.c_str());
    } else if (rank == 3) {
      LocalSocket::connect(place.address, std::chrono::steady_clock::now() + std::chrono::seconds(2)).send("nonsense");
    } else {
      if (rank == 1) sleep_s(0.3);
      Group group(place.address, rank, 2, place.nonce, short_join());
      group.barrier();
    }
  });
  for (const int status : wait_processes(children)) CHECK(status == 0);
}

TEST(too_few_descriptors_is_a_clear_error) {
  if (under_thread_sanitizer) return;
  const Place place = Place::fresh();
  check_refused(4, "", [&](int rank) {
    const rlimit limit{rlim_t(open_descriptors() + 1), 64};
    if (rank == 2) setrlimit(RLIMIT_NOFILE, &limit);
    const std::string text = join_error(place, rank, 4, short_join());
    CHECK(!text.empty());
    if (rank == 2) CHECK(text.find("descriptors") != std::string::npos || text.find("open files") != std::string::npos, "%s", text.c_str());
    return text;
  });
}

TEST(an_address_space_limit_makes_arenas_smaller) {
  if (under_thread_sanitizer || under_address_sanitizer) return;
  const Place place = Place::fresh();
  const auto children = start_processes(3, [&](int rank) {
    const rlimit limit{rlim_t(2) << 30, rlim_t(2) << 30};
    setrlimit(RLIMIT_AS, &limit);
    Settings settings = short_join();
    settings.arena_bytes = uint64_t(64) << 30;
    Group group(place.address, rank, 3, place.nonce, settings);
    auto buffer = group.buffer(10 << 20);
    group.all_reduce(buffer->data(), 1 << 20, DataType::float32, ReduceOp::sum);
  });
  for (const int status : wait_processes(children)) CHECK(status == 0);
}

TEST(ranks_in_other_namespaces_meet_all_the_same) {
  if (under_thread_sanitizer || geteuid() != 0) return;
  const Place place = Place::fresh();
  const auto children = start_processes(3, [&](int rank) {
    if (rank == 1 && unshare(CLONE_NEWIPC | CLONE_NEWNS | CLONE_NEWPID) != 0) std::fprintf(stderr, "no namespaces here\n");
    // The new pid namespace begins with the next child.
    const pid_t inner = fork();
    if (inner != 0) {
      int status = 0;
      waitpid(inner, &status, 0);
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d status %d", rank, status);
      return;
    }
    Group group(place.address, rank, 3, place.nonce, short_join());
    group.barrier();
    if (rank == 1) _exit(0);  // without closing
    int culprit = -1;
    try {
      group.barrier();
    } catch (const PeerLost& error) {
      culprit = error.rank;
    }
    _exit(culprit == 1 ? 0 : 3);
  });
  for (const int status : wait_processes(children)) CHECK(status == 0, "status %d", status);
}
