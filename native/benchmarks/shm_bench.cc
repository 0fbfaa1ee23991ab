// How fast the fabric is, against the limit of the machine.
//
//   shm_bench [worlds=2,4,8] [sizes=1024,...] [memory=limit,shared,private] [repeats=5] [pin=1] [a setting=value ...]
//
// In every iteration every rank overwrites its whole buffer, all meet in a barrier, and then they reduce. The time of
// an operation is from the first rank's start to the last rank's end. The overwriting is timed too, in this loop and
// alone: what it costs more here (the peer's cache has the lines) is part of the price of sharing memory.
//
// The limit is the same reads and writes by the same processes without any synchronization: it computes nothing
// useful, but no correct all-reduce with this traffic can be faster. Answers are checked before and after the timing.
// Figures are the median over all iterations of all repeats.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "collectives.h"
#include "group.h"
#include "kernels.h"

using namespace syncline;

namespace {

struct Options {
  std::vector<uint64_t> worlds{2, 4, 8};
  std::vector<uint64_t> sizes{1 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20};
  std::vector<std::string> memory{"limit", "shared", "private"};
  int repeats = 5;
  bool pin = false;  // rank r on core r, for comparing settings on a machine that is not quiet
  Settings settings;
};

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The clock is the same for all processes.
struct Sample {
  double fill_alone, fill, start, end;
};

// The samples of all ranks, in memory that the parent can read.
struct Samples {
  Samples(int world, uint64_t iterations)
      : world(world), iterations(iterations), bytes(uint64_t(world) * iterations * sizeof(Sample)) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    all = static_cast<Sample*>(pages);
  }
  ~Samples() { munmap(all, bytes); }

  Sample& at(int rank, uint64_t turn) const { return all[uint64_t(rank) * iterations + turn]; }

  double over_iterations(const std::function<double(uint64_t)>& value) const {
    std::vector<double> values;
    for (uint64_t turn = 0; turn < iterations; ++turn) values.push_back(value(turn));
    return median(values);
  }
  double operation_s() const {
    return over_iterations([&](uint64_t turn) {
      double start = at(0, turn).start, end = at(0, turn).end;
      for (int rank = 1; rank < world; ++rank) {
        start = std::min(start, at(rank, turn).start);
        end = std::max(end, at(rank, turn).end);
      }
      return end - start;
    });
  }
  double fill_s() const { return over_iterations([&](uint64_t turn) { return at(0, turn).fill; }); }
  double fill_alone_s() const { return over_iterations([&](uint64_t turn) { return at(0, turn).fill_alone; }); }

  int world;
  uint64_t iterations, bytes;
  Sample* all;
};

void fill(float* data, uint64_t count, int rank, uint64_t turn) {
  const float base = float(rank + 1) + float(turn % 5);
  for (uint64_t i = 0; i < count; ++i) data[i] = base + float(i & 127);
}

void verify(const float* data, uint64_t count, int world, uint64_t turn) {
  const float base = float(world * (world + 1) / 2) + float(world) * float(turn % 5);
  for (uint64_t i = 0; i < count; ++i) {
    if (data[i] == base + float(world) * float(i & 127)) continue;
    std::fprintf(stderr, "wrong answer at element %lu\n", (unsigned long)i);
    _exit(1);
  }
}

// Enough iterations for a steady loop, few enough for the large sizes to end.
uint64_t iterations_for(uint64_t bytes, int world, int repeats) {
  return uint64_t(repeats) * std::clamp<uint64_t>((uint64_t(400) << 20) / (bytes * uint64_t(world) + 4096), 4, 2000);
}

template <class Operation>
void measure(Group& group, float* data, uint64_t count, Samples& samples, const Operation& operation) {
  const int rank = group.rank();
  for (uint64_t turn = 0; turn < samples.iterations; ++turn) {
    const double start = now_s();
    fill(data, count, rank, turn);
    samples.at(rank, turn).fill_alone = now_s() - start;
  }
  for (uint64_t turn = 0; turn < samples.iterations; ++turn) {
    Sample& sample = samples.at(rank, turn);
    const double start = now_s();
    fill(data, count, rank, turn);
    sample.fill = now_s() - start;
    group.barrier();
    sample.start = now_s();
    operation();
    sample.end = now_s();
  }
}

void measure_all_reduce(Group& group, float* data, uint64_t count, Samples& samples) {
  const auto reduce = [&] { group.all_reduce(data, count, DataType::float32, ReduceOp::sum); };
  const auto check = [&](uint64_t turn) {
    fill(data, count, group.rank(), turn);
    reduce();
    verify(data, count, group.world(), turn);
  };
  for (uint64_t turn = 0; turn < 3; ++turn) check(turn);
  measure(group, data, count, samples, reduce);
  check(3);
}

// The traffic of the all-reduce of shared buffers, without the waiting.
void measure_limit(Group& group, const std::vector<std::byte*>& buffers, uint64_t count, uint64_t fold_bytes,
                   Samples& samples) {
  const int rank = group.rank(), world = group.world();
  const Range slice = slice_of(count, rank, world, sizeof(float));
  const uint64_t step = fold_bytes / sizeof(float);
  measure(group, reinterpret_cast<float*>(buffers[rank]), count, samples, [&] {
    for (uint64_t first = slice.first; first < slice.last; first += step) {
      const uint64_t now = std::min(step, slice.last - first);
      const void* inputs[max_world];
      for (int peer = 0; peer < world; ++peer) inputs[peer] = buffers[peer] + first * sizeof(float);
      std::byte* mine = buffers[rank] + first * sizeof(float);
      fold(mine, inputs, world, now, DataType::float32, ReduceOp::sum);
      for (int peer = 0; peer < world; ++peer)
        if (peer != rank) copy_bytes(buffers[peer] + first * sizeof(float), mine, now * sizeof(float));
    }
  });
}

std::byte* shared_pages(uint64_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) std::abort();
  return static_cast<std::byte*>(pages);
}

void pin_to_core(int rank) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(size_t(rank) % size_t(sysconf(_SC_NPROCESSORS_ONLN)), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

void run_rank(Group& group, uint64_t bytes, const std::string& memory, const std::vector<std::byte*>& buffers,
              const Options& options, Samples& samples) {
  const uint64_t count = bytes / sizeof(float);
  if (memory == "limit") return measure_limit(group, buffers, count, options.settings.fold_bytes, samples);
  std::vector<float> own(memory == "private" ? count : 0);
  const auto shared = memory == "shared" ? group.buffer(bytes) : nullptr;
  measure_all_reduce(group, shared ? static_cast<float*>(shared->data()) : own.data(), count, samples);
}

void run_case(int world, uint64_t bytes, const std::string& memory, const Options& options, Samples& samples) {
  std::vector<std::byte*> buffers;
  for (int rank = 0; rank < world && memory == "limit"; ++rank) buffers.push_back(shared_pages(bytes));
  static int cases = 0;
  const std::string address = "@syncline-bench-" + std::to_string(getpid()) + "-" + std::to_string(++cases);
  for (int rank = 0; rank < world; ++rank) {
    if (fork() != 0) continue;
    Group group(address, rank, world, Nonce{1}, options.settings);
    if (options.pin) pin_to_core(rank);
    run_rank(group, bytes, memory, buffers, options, samples);
    group.close();
    _exit(0);
  }
  for (int status = 0; wait(&status) > 0;)
    if (status != 0) std::exit(1);
  for (std::byte* buffer : buffers) munmap(buffer, bytes);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<uint64_t> numbers(const std::string& text) {
  std::vector<uint64_t> values;
  for (const auto& part : split(text)) values.push_back(std::strtoull(part.c_str(), nullptr, 10));
  return values;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int k = 1; k < argc; ++k) {
    const std::string text = argv[k], key = text.substr(0, text.find('=')), value = text.substr(text.find('=') + 1);
    const auto number = std::strtoull(value.c_str(), nullptr, 10);
    if (key == "worlds") options.worlds = numbers(value);
    else if (key == "sizes") options.sizes = numbers(value);
    else if (key == "memory") options.memory = split(value);
    else if (key == "repeats") options.repeats = int(number);
    else if (key == "pin") options.pin = number != 0;
    else if (key == "fold_bytes") options.settings.fold_bytes = number;
    else if (key == "piece_bytes") options.settings.piece_bytes = number;
    else if (key == "slot_bytes") options.settings.slot_bytes = number;
    else if (key == "direct_from_bytes") options.settings.direct_from_bytes = number;
    else if (key == "spin_rounds") options.settings.spin_rounds = int(number);
    else if (key == "yield_us") options.settings.yield_us = int(number);
    else std::fprintf(stderr, "unknown option %s\n", key.c_str()), std::exit(2);
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  std::printf("%5s %10s %-8s %12s %8s %9s %13s %9s\n", "ranks", "bytes", "memory", "op us", "GB/s", "of limit",
              "overwrite us", "alone us");
  for (const uint64_t world : options.worlds)
    for (const uint64_t bytes : options.sizes) {
      double limit_s = 0;
      for (const std::string& memory : options.memory) {
        Samples samples(int(world), iterations_for(bytes, int(world), options.repeats));
        run_case(int(world), bytes, memory, options, samples);
        const double operation_s = samples.operation_s();
        if (memory == "limit") limit_s = operation_s;
        std::printf("%5d %10lu %-8s %12.2f %8.2f %8.0f%% %13.2f %9.2f\n", int(world), (unsigned long)bytes, memory.c_str(),
                    operation_s * 1e6, double(bytes) / operation_s * 1e-9, 100 * limit_s / operation_s,
                    samples.fill_s() * 1e6, samples.fill_alone_s() * 1e6);
        std::fflush(stdout);
      }
    }
}
