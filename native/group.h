// The shared-memory fabric of one rank: the public face of this library.
//
//   Group group("@job-1234", rank, world, nonce, settings);     // returns when all ranks have joined
//   auto bucket = group.buffer(25 << 20);                       // memory that peers reduce in place
//   group.run({.kind = Kind::all_reduce, .output = bucket->data(), .count = n, .op = ReduceOp::mean});
//   auto handle = group.submit({...});  ...  handle->wait();
//
// Calls may come from several threads; they take effect in the order in which they were made, and that order
// must be the same on all ranks. After a FabricError other than Desync the group is broken for good: every later
// call raises the same error. A buffer outlives its group.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "errors.h"
#include "forked.h"
#include "handle.h"
#include "layout.h"
#include "queue.h"
#include "segment.h"
#include "settings.h"
#include "types.h"

namespace syncline {

struct Engine;
struct Membership;

class Group {
 public:
  // Throws JoinError. `address` is a path, or an abstract name that starts with '@'; not used in a world of one.
  Group(const std::string& address, int rank, int world, const Nonce& nonce, const Settings& settings = {});
  Group(Membership, const Settings& settings);
  Group(const Group&) = delete;
  ~Group();  // close(false)

  int rank() const { return rank_; }
  int world() const { return world_; }

  std::shared_ptr<Buffer> buffer(uint64_t bytes);            // throws Exhausted
  bool reaches(const void* data, uint64_t bytes) const;      // is it in a buffer of this group?

  void run(const Call&);                                     // blocks until done
  std::shared_ptr<Handle> submit(Call);                      // the memory must live until the handle is done

  // What an all-reduce of a shared buffer reads and writes, without waiting for anybody: the limit of the machine, for
  // benchmarks. The buffers of all ranks must be at the same offset.
  void unsynchronized_all_reduce(void* data, uint64_t count, DataType, ReduceOp);

  // A few numbers that the other ranks can read at any time, also after this one was killed or stopped.
  void write_note(const Note&);
  Note note_of(int rank) const;

  // The rank that the running operation waits for at this moment, or -1; for reports of slow operations.
  int suspect() const;

  // Ends what is under way and all that comes, here and on the other ranks.
  void abort(const std::string& why);

  // With `drain` waits for what was submitted; otherwise what is under way fails, here and on the other ranks.
  void close(bool drain = true);
  bool closed() const { return closed_.load(); }

  // The same calls by name.
  void barrier();
  void all_reduce(void* data, uint64_t count, DataType, ReduceOp, const std::string& label = {});
  void reduce_scatter(const void* input, void* output, uint64_t count, DataType, ReduceOp, const std::string& label = {});
  void all_gather(const void* input, void* output, uint64_t count, DataType, const std::string& label = {});
  void broadcast(void* data, uint64_t count, DataType, int root, const std::string& label = {});
  void all_to_all(const void* input, void* output, uint64_t count, DataType, const std::string& label = {});
  void run_schedule(void* data, uint64_t count, DataType, ReduceOp, const Row* program, size_t rows,
                    const std::string& label = {});

  // Messages between two ranks. Those of a pair match in the order in which they were made; what was sent may be
  // changed, and what was received read, when the wait for its number has returned.
  uint64_t send(const void* data, uint64_t bytes, int to);
  uint64_t receive(void* data, uint64_t bytes, int source);
  void wait_sent(int to, uint64_t number, double deadline_s = 0);
  void wait_received(int source, uint64_t number, double deadline_s = 0);

 private:
  void require_usable() const;
  Outcome perform(const Call&, bool in_worker);
  void wait_here(Handle&);
  void interrupt(const char* why);

  int rank_;
  int world_;
  Birthplace birthplace_;
  std::shared_ptr<Arena> arena_;
  std::function<void()> check_signals_;
  std::atomic<bool> closed_{false};
  mutable std::mutex ending_;  // held to look at the engine from outside an operation, and to end it
  std::unique_ptr<Engine> engine_;
  std::mutex messages_;        // held while a message gets its number
  Queue queue_;
};

}  // namespace syncline
