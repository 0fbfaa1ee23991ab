#include "schedule.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "collectives.h"
#include "kernels.h"

namespace syncline {

namespace {

constexpr int64_t max_step = INT32_MAX;

bool is_peer(int64_t rank, int world) { return rank >= 0 && rank < world; }
bool is_range(int64_t lo, int64_t hi, uint64_t count) { return lo >= 0 && lo <= hi && uint64_t(hi) <= count; }
bool is_step(int64_t step) { return step >= 0 && step <= max_step; }
bool is_mask(uint64_t mask, int world) { return mask != 0 && int(std::bit_width(mask)) <= world; }

bool is_row(const Row& row, uint64_t count, int world) {
  switch (Opcode(row.opcode)) {
    case Opcode::wait: return is_peer(row.a, world) && is_step(row.b);
    case Opcode::pull_add:
    case Opcode::pull_copy: return is_peer(row.a, world) && is_range(row.b, row.c, count);
    case Opcode::fold: return is_range(row.a, row.b, count) && is_mask(uint64_t(row.c), world);
    case Opcode::finish: return is_range(row.a, row.b, count);
    case Opcode::signal: return is_step(row.a);
  }
  return false;
}

bool is_half(DataType dtype) { return dtype == DataType::float16 || dtype == DataType::bfloat16; }

class Run {
 public:
  Run(Engine& engine, const Call& call)
      : engine_(engine),
        mesh_(engine.mesh),
        call_(call),
        dtype_(is_half(call.dtype) ? DataType::float32 : call.dtype),
        element_(size_of(dtype_)) {}

  void operator()() {
    enter_work_buffer();
    engine_.agreement.announce(call_, mesh_.arena().offset_of(work_));
    engine_.agreement.reach(call_);
    for (size_t k = 0; k < call_.rows; ++k) step(call_.program[k]);
    engine_.finish_together();
    leave_work_buffer();
  }

 private:
  bool in_place() const { return work_ == call_.output; }

  void enter_work_buffer() {
    const uint64_t bytes = call_.count * element_;
    const bool reachable = engine_.offset_of(call_.output, bytes) != private_memory;
    work_ = static_cast<std::byte*>(call_.output);
    if (reachable && !is_half(call_.dtype)) return;
    mesh_.enter(Phase::copy_in);
    work_ = scratch(bytes);
    if (is_half(call_.dtype)) return widen(reinterpret_cast<float*>(work_), call_.output, call_.count, call_.dtype);
    copy_bytes(work_, call_.output, bytes);
  }

  void leave_work_buffer() const {
    if (in_place()) return;
    if (is_half(call_.dtype))
      return narrow(call_.output, reinterpret_cast<const float*>(work_), call_.count, call_.dtype);
    copy_bytes(call_.output, work_, call_.count * element_);
  }

  std::byte* scratch(uint64_t bytes) {
    if (!engine_.scratch || engine_.scratch->bytes() < bytes) {
      engine_.scratch.reset();
      engine_.scratch = std::make_shared<Buffer>(mesh_.shared_arena(), std::max<uint64_t>(bytes, page_bytes));
    }
    return static_cast<std::byte*>(engine_.scratch->data());
  }

  // The sequence number in the upper half makes the steps of one operation later than all before it.
  uint64_t progress(int64_t step) const { return engine_.agreement.sequence() << 32 | uint64_t(step); }

  std::byte* at(int rank, int64_t element) const {
    return mesh_.base(rank) + engine_.agreement.offset(rank) + uint64_t(element) * element_;
  }

  void step(const Row& row) {
    switch (Opcode(row.opcode)) {
      case Opcode::wait: return wait(int(row.a), row.b);
      case Opcode::pull_add: return pull_add(int(row.a), row.b, row.c);
      case Opcode::pull_copy: return pull_copy(int(row.a), row.b, row.c);
      case Opcode::fold: return fold_ranks(row.a, row.b, uint64_t(row.c));
      case Opcode::finish: return finish(row.a, row.b);
      case Opcode::signal: return mesh_.signal(&Control::progress, progress(row.a));
    }
  }

  void wait(int peer, int64_t step) {
    if (step > 0 && peer != mesh_.rank()) mesh_.wait_for(peer, &Control::progress, progress(step));
  }

  void pull_add(int peer, int64_t lo, int64_t hi) {
    fold_ranks(lo, hi, uint64_t(1) << peer | uint64_t(1) << mesh_.rank());
  }

  void pull_copy(int peer, int64_t lo, int64_t hi) {
    mesh_.enter(Phase::writing);
    if (hi > lo && peer != mesh_.rank()) copy_bytes(at(mesh_.rank(), lo), at(peer, lo), uint64_t(hi - lo) * element_);
  }

  void fold_ranks(int64_t lo, int64_t hi, uint64_t mask) {
    mesh_.enter(Phase::writing);
    const void* inputs[max_world];
    int num_inputs = 0;
    for (int rank = 0; rank < mesh_.world(); ++rank)
      if (mask >> rank & 1) inputs[num_inputs++] = at(rank, lo);
    // Not the mean of these: a program divides once, when all have been added.
    const ReduceOp op = call_.op == ReduceOp::max ? ReduceOp::max : ReduceOp::sum;
    fold(at(mesh_.rank(), lo), inputs, num_inputs, uint64_t(hi - lo), dtype_, op);
  }

  void finish(int64_t lo, int64_t hi) {
    if (call_.op == ReduceOp::mean) {
      void* const mine = at(mesh_.rank(), lo);
      divide(mine, mine, uint64_t(hi - lo), dtype_, mesh_.world());
    }
  }

  Engine& engine_;
  Mesh& mesh_;
  const Call& call_;
  DataType dtype_;
  size_t element_;
  std::byte* work_ = nullptr;
};

}  // namespace

void validate_program(const Call& call, int world) {
  if (call.rows > 0 && call.program == nullptr) throw std::invalid_argument("the program is a null pointer");
  int64_t last_step = 0;
  for (size_t k = 0; k < call.rows; ++k) {
    const Row& row = call.program[k];
    const bool goes_back = Opcode(row.opcode) == Opcode::signal && row.a < last_step;
    if (!is_row(row, call.count, world) || goes_back)
      throw std::invalid_argument("row " + std::to_string(k) + " of the program is wrong: {" +
                                  std::to_string(row.opcode) + ", " + std::to_string(row.a) + ", " +
                                  std::to_string(row.b) + ", " + std::to_string(row.c) + "} with " +
                                  std::to_string(call.count) + " elements and " + std::to_string(world) + " ranks" +
                                  (goes_back ? "; a signal never goes back" : ""));
    if (Opcode(row.opcode) == Opcode::signal) last_step = row.a;
  }
}

void run_schedule(Engine& engine, const Call& call) { Run(engine, call)(); }

}  // namespace syncline
