// A local stream of packets with descriptors, every wait with a deadline. Errors are JoinError.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "descriptor.h"

namespace syncline {

using Deadline = std::chrono::steady_clock::time_point;

struct Packet {
  std::string bytes;
  std::vector<Descriptor> descriptors;
};

class LocalSocket {
 public:
  LocalSocket() = default;
  explicit LocalSocket(Descriptor socket) : socket_(std::move(socket)) {}

  static LocalSocket connect(const std::string& address, Deadline);  // tries again until somebody listens
  void send(const std::string& bytes, const std::vector<int>& descriptors = {}) const;
  Packet receive(Deadline) const;  // an empty packet means that the other side hung up
  bool same_user() const;
  explicit operator bool() const { return bool(socket_); }

 private:
  Descriptor socket_;
};

// Listens until destroyed; a path is removed again.
class LocalListener {
 public:
  explicit LocalListener(const std::string& address);
  LocalListener(const LocalListener&) = delete;
  ~LocalListener();
  LocalSocket accept(Deadline) const;  // throws JoinError at the deadline

 private:
  std::string path_;
  Descriptor socket_;
};

}  // namespace syncline
