#include "mailbox.h"

#include <cstring>
#include <string>

#include "errors.h"

namespace syncline {

Mailbox::Mailbox(Mesh& mesh) : mesh_(mesh), outgoing_(mesh.world()), incoming_(mesh.world()) {}

void Mailbox::send(const void* data, uint64_t bytes, int to) {
  Outgoing& out = outgoing_[to];
  if (out.sent >= max_envelopes) wait_sent(to, out.sent - max_envelopes + 1);
  std::shared_ptr<Buffer> copy;
  if (bytes > 0 && !mesh_.arena().contains(data, bytes)) {
    copy = std::make_shared<Buffer>(mesh_.shared_arena(), bytes);
    std::memcpy(copy->data(), data, bytes);
    data = copy->data();
  }
  out.copies.push_back(std::move(copy));
  const uint64_t number = ++out.sent;
  mesh_.post(mesh_.rank()).envelopes[to][number % max_envelopes] = {bytes > 0 ? mesh_.arena().offset_of(data) : 0, bytes};
  mesh_.signal(mesh_.own().sent[to], number);
}

void Mailbox::expect(void* data, uint64_t bytes, int source) {
  incoming_[source].waiting.push_back({data, bytes});
  ++incoming_[source].expected;
}

void Mailbox::wait_sent(int to, uint64_t number) {
  mesh_.wait_for(to, mesh_.control(to).taken[mesh_.rank()], number);
  forget_taken(to, number);
}

void Mailbox::forget_taken(int to, uint64_t number) {
  Outgoing& out = outgoing_[to];
  while (out.sent - out.copies.size() < number) out.copies.pop_front();
}

void Mailbox::wait_received(int source, uint64_t number) {
  while (incoming_[source].taken < number) take(source);
}

void Mailbox::take(int source) {
  Incoming& in = incoming_[source];
  const uint64_t number = in.taken + 1;
  mesh_.wait_for(source, mesh_.control(source).sent[mesh_.rank()], number);
  const Envelope envelope = mesh_.post(source).envelopes[mesh_.rank()][number % max_envelopes];
  const Expected expected = in.waiting.front();
  if (envelope.bytes == expected.bytes && expected.bytes > 0)
    std::memcpy(expected.data, mesh_.base(source) + envelope.offset, expected.bytes);
  in.waiting.pop_front();
  in.taken = number;
  mesh_.signal(mesh_.own().taken[source], number);
  if (envelope.bytes != expected.bytes)
    throw Desync(source, "rank " + std::to_string(source) + " sent " + std::to_string(envelope.bytes) +
                             " bytes, but rank " + std::to_string(mesh_.rank()) + " expected " +
                             std::to_string(expected.bytes));
}

}  // namespace syncline
