// Messages between two ranks.
//
// For each receiver a sender has a ring of envelopes, each of which says where in the sender's arena the
// data lies. Data that is not there yet is copied there when it is sent. The receiver copies it out and
// says so, and only then may the sender use the memory again. Messages of a pair are numbered on both
// sides and match by number.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "mesh.h"
#include "segment.h"
#include "types.h"

namespace syncline {

class Mailbox {
 public:
  explicit Mailbox(Mesh& mesh);

  void send(const void* data, uint64_t bytes, int to);  // waits only when the ring is full
  void expect(void* data, uint64_t bytes, int source);

  // The number of the last message sent to that rank, or expected from it.
  uint64_t sent(int to) const { return outgoing_[to].sent; }
  uint64_t expected(int source) const { return incoming_[source].expected; }

  // Return when the message has been taken by its receiver, or has arrived here (and all before it).
  // Throw Desync when its size is not the one expected.
  void wait_sent(int to, uint64_t number);
  void wait_received(int source, uint64_t number);

 private:
  struct Expected {
    void* data;
    uint64_t bytes;
  };
  struct Outgoing {
    uint64_t sent = 0;
    std::deque<std::shared_ptr<Buffer>> copies;  // of those not yet known to be taken; null where none was needed
  };
  struct Incoming {
    uint64_t expected = 0;
    uint64_t taken = 0;
    std::deque<Expected> waiting;  // those after `taken`
  };

  void forget_taken(int to, uint64_t number);
  void take(int source);

  Mesh& mesh_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

}  // namespace syncline
