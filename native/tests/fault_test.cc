#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "schedule.h"
#include "twin.h"

using namespace syncline;
using namespace syncline::test;

namespace {

constexpr double deadline_s = 1.0;
constexpr int world = 3;

struct Fault {
  int victim;
  int signal;
  Phase phase;
  int occurrence;  // of the phase
};

enum class Work { small, shared, separate, schedule, worker };

void work_once(Group& group, Work work, Memory& shared, std::vector<float>& separate) {
  const uint64_t count = separate.size();
  static const Row program[] = {{int64_t(Opcode::fold), 0, 1000, 7, 0}};
  switch (work) {
    case Work::small: return group.all_reduce(separate.data(), 100, DataType::float32, ReduceOp::sum);
    case Work::shared: return group.all_reduce(shared.data(), count, DataType::float32, ReduceOp::sum);
    case Work::separate: return group.all_reduce(separate.data(), count, DataType::float32, ReduceOp::sum);
    case Work::schedule: return group.run_schedule(shared.data(), count, DataType::float32, ReduceOp::sum, program, group.rank() == 0);
    case Work::worker:
      group.submit({.kind = Kind::all_reduce, .output = separate.data(), .count = count})->wait();
      return;
  }
}

struct Shared {
  std::atomic<double> struck_at{0};
};

Shared* shared_page() {
  void* page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (page) Shared();
}

// Works until the victim is struck; returns normally only if the right error came in time.
void survive(Group& group, Work work, const Fault& fault, const Shared& shared) {
  Memory memory(group, true, 2'000'000);
  std::vector<float> separate(500'000);
  int culprit = -1;
  bool lost = false;
  std::string text;
  try {
    for (int turn = 0; turn < 1000; ++turn) work_once(group, work, memory, separate);
  } catch (const PeerLost& error) {
    culprit = error.rank, lost = true, text = error.what();
  } catch (const PeerStalled& error) {
    culprit = error.rank, text = error.what();
  }
  const double late = now_s() - shared.struck_at;
  CHECK(culprit == fault.victim, "rank %d blamed %d: %s", group.rank(), culprit, text.c_str());
  CHECK(lost == (fault.signal == SIGKILL), "%s", text.c_str());
  CHECK(late < deadline_s + 1, "%f s", late);
}

struct Struck {
  Fault fault;
  Shared* shared;
  std::vector<pid_t> children;
};

Struck strike(Work work, const Fault& fault) {
  Shared* shared = shared_page();
  const Place place = Place::fresh();
  auto children = start_processes(world, [&](int rank) {
    Settings settings = quick_settings();
    settings.deadline_s = deadline_s;
    int seen = 0;
    if (rank == fault.victim)
      settings.on_phase = [&](Phase phase) {
        if (phase != fault.phase || ++seen != fault.occurrence) return;
        shared->struck_at = now_s();
        kill(getpid(), fault.signal);
        while (fault.signal == SIGKILL) sleep_s(1);
      };
    Group group(place.address, rank, world, place.nonce, settings);
    survive(group, work, fault, *shared);
  });
  return {fault, shared, std::move(children)};
}

// Whether all survivors were told of the right rank in time.
bool survived(const Struck& struck) {
  int good = 0;
  for (int rank = 0; rank < world; ++rank)
    if (rank != struck.fault.victim) good += wait_processes({struck.children[rank]}, 20)[0] == 0;
  const pid_t victim = struck.children[struck.fault.victim];
  kill(victim, SIGKILL);
  wait_processes({victim});
  munmap(struck.shared, sizeof(Shared));
  return good == world - 1;
}

void strike_everywhere(Work work, const std::vector<Phase>& phases) {
  if (under_thread_sanitizer) return;
  for (const Phase phase : phases)
    for (const int signal : {SIGKILL, SIGSTOP}) {
      std::vector<Struck> groups;  // side by side, because they mostly wait
      for (int victim = 0; victim < world; ++victim)
        groups.push_back(strike(work, {victim, signal, phase, signal == SIGKILL ? 1 : 3}));
      std::string bad;
      for (const Struck& struck : groups)
        if (!survived(struck)) bad.append(std::to_string(struck.fault.victim)).append(" ");
      CHECK(bad.empty(), "work %d, signal %d, phase %d, victims %s", int(work), signal, int(phase), bad.c_str());
    }
}

int files_in_shared_memory() {
  int count = 0;
  DIR* folder = opendir("/dev/shm");
  while (folder && readdir(folder)) ++count;
  if (folder) closedir(folder);
  return count;
}

}  // namespace

TEST(faults_in_small_messages) {
  const int before = files_in_shared_memory();
  strike_everywhere(Work::small, {Phase::before, Phase::copy_in, Phase::agreed});
  CHECK(files_in_shared_memory() == before);
}
TEST(faults_in_shared_buffers) { strike_everywhere(Work::shared, {Phase::before, Phase::agreed, Phase::writing, Phase::finishing}); }
TEST(faults_in_staged_buffers) { strike_everywhere(Work::separate, {Phase::before, Phase::copy_in, Phase::agreed, Phase::writing}); }
TEST(faults_in_schedules) { strike_everywhere(Work::schedule, {Phase::before, Phase::agreed, Phase::finishing}); }
TEST(faults_in_the_worker) { strike_everywhere(Work::worker, {Phase::worker, Phase::copy_in, Phase::writing}); }

// Stopped from outside, while it sleeps in a wait for another rank: the chain of waits must not end at that one.
TEST(a_rank_stopped_while_it_waits_is_named) {
  if (under_thread_sanitizer) return;
  const Place place = Place::fresh();
  const auto children = start_processes(world, [&](int rank) {
    Settings settings = quick_settings();
    settings.deadline_s = 1.5;
    Group group(place.address, rank, world, place.nonce, settings);
    group.barrier();
    if (rank == 2) sleep_s(1.0);  // rank 1 waits for this rank when it is stopped
    int culprit = -1;
    std::string text;
    try {
      for (int turn = 0; turn < 3; ++turn) group.barrier();
    } catch (const PeerStalled& error) {
      culprit = error.rank;
      text = error.what();
    }
    CHECK(culprit == 1, "rank %d blamed %d: %s", rank, culprit, text.c_str());
  });
  sleep_s(0.5);
  kill(children[1], SIGSTOP);
  CHECK(wait_processes({children[0]}, 20)[0] == 0);
  CHECK(wait_processes({children[2]}, 20)[0] == 0);
  kill(children[1], SIGKILL);
  wait_processes({children[1]});
}

TEST(a_slow_rank_below_the_deadline_does_not_fail) {
  Settings settings = quick_settings();
  settings.deadline_s = 1.5;
  run_ranks(3, [](Group& group) {
    std::vector<float> values(300'000, 1);
    for (int turn = 0; turn < 3; ++turn) {
      if (group.rank() == turn) sleep_s(0.7);
      group.all_reduce(values.data(), values.size(), DataType::float32, ReduceOp::mean);
      CHECK(values[5] == 1);
    }
  }, settings);
}

TEST(a_rank_that_never_calls_is_named_by_all) {
  Settings settings = quick_settings();
  settings.deadline_s = 0.5;
  run_ranks(4, [](Group& group) {
    if (group.rank() == 2) return sleep_s(1.2);
    int culprit = -1;
    try {
      group.barrier();
    } catch (const PeerStalled& error) {
      culprit = error.rank;
    }
    CHECK(culprit == 2);
  }, settings);
}
