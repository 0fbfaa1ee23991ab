#include "group.h"

#include <stdexcept>
#include <utility>

#include "collectives.h"
#include "join.h"
#include "schedule.h"

namespace syncline {

namespace {

constexpr double signal_slice_s = 0.05;

void execute(Engine& engine, const Call& call) {
  switch (call.kind) {
    case Kind::barrier: return barrier(engine, call);
    case Kind::all_reduce: return all_reduce(engine, call);
    case Kind::reduce_scatter: return reduce_scatter(engine, call);
    case Kind::all_gather: return all_gather(engine, call);
    case Kind::broadcast: return broadcast(engine, call);
    case Kind::all_to_all: return all_to_all(engine, call);
    case Kind::schedule: return run_schedule(engine, call);
    case Kind::send: return engine.mailbox.send(call.output, call.count, call.root);
    case Kind::expect: return engine.mailbox.expect(call.output, call.count, call.root);
    case Kind::await_sent: return engine.mailbox.wait_sent(call.root, call.count);
    case Kind::await_received: return engine.mailbox.wait_received(call.root, call.count);
  }
}

}  // namespace

Group::Group(const std::string& address, int rank, int world, const Nonce& nonce, const Settings& settings)
    : Group(join(address, rank, world, nonce, settings), settings) {}

Group::Group(Membership membership, const Settings& settings)
    : rank_(membership.rank),
      world_(membership.world),
      arena_(membership.arena),
      check_signals_(settings.check_signals),
      engine_(std::make_unique<Engine>(std::move(membership), settings)),
      queue_([this](const Call& call, bool in_worker) { return perform(call, in_worker); }) {}

Group::~Group() { close(false); }

std::shared_ptr<Buffer> Group::buffer(uint64_t bytes) {
  require_usable();
  return std::make_shared<Buffer>(arena_, bytes);
}

bool Group::reaches(const void* data, uint64_t bytes) const { return arena_->contains(data, bytes); }

void Group::require_usable() const {
  if (!birthplace_.here())
    throw std::logic_error("the group belongs to the parent process; make a new one after fork");
  if (closed()) throw std::logic_error("the group is closed");
}

Outcome Group::perform(const Call& call, bool in_worker) {
  Mesh& mesh = engine_->mesh;
  mesh.check_signals_here = !in_worker;
  mesh.set_operation(call);
  raise_failure(mesh.failure());
  try {
    if (!is_message(call.kind)) engine_->agreement.prepare();
    engine_->finite = Finite::unknown;
    mesh.enter(in_worker ? Phase::worker : Phase::before);
    execute(*engine_, call);
    return {engine_->agreement.reached_ns(), engine_->finite};
  } catch (const Desync&) {
    // Some ranks had already staged their first piece for this operation; all give that number up.
    engine_->staging.skip();
    throw;
  } catch (const FabricError&) {
    throw;
  } catch (const std::exception& error) {
    // The others would wait in vain for the rest of this operation.
    propose_failure(mesh.failure(), FailureKind::aborted, rank_,
                    "rank " + std::to_string(rank_) + " gave up " + describe(call) + ": " + error.what());
    throw;
  }
}

void Group::run(const Call& call) {
  require_usable();
  validate(call, world_);
  if (const auto handle = queue_.run_or_submit(call)) wait_here(*handle);
}

// The worker cannot receive this thread's signals, so this thread looks for them itself.
void Group::wait_here(Handle& handle) {
  try {
    while (!handle.wait(signal_slice_s))
      if (check_signals_) check_signals_();
  } catch (...) {
    if (!handle.done()) interrupt("was interrupted");
    throw;
  }
}

void Group::interrupt(const char* why) {
  const std::lock_guard lock(ending_);
  if (engine_) engine_->mesh.interrupt(why);
}

void Group::abort(const std::string& why) {
  const std::lock_guard lock(ending_);
  if (engine_) propose_failure(engine_->mesh.failure(), FailureKind::aborted, rank_, why);
}

std::shared_ptr<Handle> Group::submit(Call call) {
  require_usable();
  validate(call, world_);
  return queue_.submit(std::move(call));
}

void Group::unsynchronized_all_reduce(void* data, uint64_t count, DataType dtype, ReduceOp op) {
  require_usable();
  const Call call{.kind = Kind::all_reduce, .output = data, .count = count, .dtype = dtype, .op = op};
  validate(call, world_);
  if (!reaches(data, count * size_of(dtype))) throw std::invalid_argument("the buffer is not in shared memory");
  std::byte* buffers[max_world];
  for (int rank = 0; rank < world_; ++rank) buffers[rank] = engine_->mesh.base(rank) + arena_->offset_of(data);
  fold_slice(*engine_, call, buffers);
}

void Group::write_note(const Note& note) {
  const std::lock_guard lock(ending_);
  if (!engine_) return;
  for (size_t k = 0; k < note.size(); ++k) engine_->mesh.own().note[k].store(note[k], std::memory_order_relaxed);
}

Note Group::note_of(int rank) const {
  if (rank < 0 || rank >= world_) throw std::invalid_argument("there is no rank " + std::to_string(rank));
  const std::lock_guard lock(ending_);
  Note note{};
  if (engine_)
    for (size_t k = 0; k < note.size(); ++k) note[k] = engine_->mesh.control(rank).note[k].load(std::memory_order_relaxed);
  return note;
}

int Group::suspect() const {
  const std::lock_guard lock(ending_);
  return engine_ ? engine_->mesh.suspect() : -1;
}

void Group::close(bool drain) {
  if (!birthplace_.here()) {
    // A lock that another thread held when the process was forked stays locked here for ever: take none.
    queue_.abandon();
    closed_.store(true);
    engine_.reset();
    return;
  }
  if (!drain) {
    interrupt("closed the group");
    queue_.cancel(std::make_exception_ptr(Aborted(rank_, "the group was closed before the operation began")));
  }
  queue_.stop();
  closed_.store(true);
  const std::lock_guard lock(ending_);
  if (engine_) engine_->mesh.own().left.store(1);
  engine_.reset();
}

void Group::barrier() { run({.kind = Kind::barrier}); }

void Group::all_reduce(void* data, uint64_t count, DataType dtype, ReduceOp op, const std::string& label) {
  run({.kind = Kind::all_reduce, .output = data, .count = count, .dtype = dtype, .op = op, .label = label});
}

void Group::reduce_scatter(const void* input, void* output, uint64_t count, DataType dtype, ReduceOp op,
                           const std::string& label) {
  run({.kind = Kind::reduce_scatter, .input = input, .output = output, .count = count, .dtype = dtype, .op = op,
       .label = label});
}

void Group::all_gather(const void* input, void* output, uint64_t count, DataType dtype, const std::string& label) {
  run({.kind = Kind::all_gather, .input = input, .output = output, .count = count, .dtype = dtype, .label = label});
}

void Group::broadcast(void* data, uint64_t count, DataType dtype, int root, const std::string& label) {
  run({.kind = Kind::broadcast, .output = data, .count = count, .dtype = dtype, .root = root, .label = label});
}

void Group::all_to_all(const void* input, void* output, uint64_t count, DataType dtype, const std::string& label) {
  run({.kind = Kind::all_to_all, .input = input, .output = output, .count = count, .dtype = dtype, .label = label});
}

void Group::run_schedule(void* data, uint64_t count, DataType dtype, ReduceOp op, const Row* program, size_t rows,
                         const std::string& label) {
  run({.kind = Kind::schedule, .output = data, .count = count, .dtype = dtype, .op = op, .label = label,
       .program = program, .rows = rows});
}

uint64_t Group::send(const void* data, uint64_t bytes, int to) {
  const std::lock_guard lock(messages_);
  run({.kind = Kind::send, .output = const_cast<void*>(data), .count = bytes, .dtype = DataType::byte, .root = to});
  return engine_->mailbox.sent(to);
}

uint64_t Group::receive(void* data, uint64_t bytes, int source) {
  const std::lock_guard lock(messages_);
  run({.kind = Kind::expect, .output = data, .count = bytes, .dtype = DataType::byte, .root = source});
  return engine_->mailbox.expected(source);
}

void Group::wait_sent(int to, uint64_t number, double deadline_s) {
  run({.kind = Kind::await_sent, .count = number, .root = to, .deadline_s = deadline_s});
}

void Group::wait_received(int source, uint64_t number, double deadline_s) {
  run({.kind = Kind::await_received, .count = number, .root = source, .deadline_s = deadline_s});
}

}  // namespace syncline
