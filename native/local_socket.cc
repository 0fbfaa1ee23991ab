#include "local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "errors.h"

namespace syncline {

namespace {

constexpr size_t max_packet_bytes = 8192;
constexpr size_t max_descriptors = 253;  // the kernel's own limit per packet

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;

  explicit Address(const std::string& text) {
    name.sun_family = AF_UNIX;
    if (text.empty() || text.size() >= sizeof name.sun_path)
      throw JoinError("the address \"" + text + "\" must have 1 to " + std::to_string(sizeof name.sun_path - 1) +
                      " bytes; try a shorter path or an abstract name such as @syncline-1234");
    std::memcpy(name.sun_path, text.data(), text.size());
    if (text[0] == '@') name.sun_path[0] = '\0';
    length = socklen_t(offsetof(sockaddr_un, sun_path) + text.size() + (text[0] == '@' ? 0 : 1));
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Descriptor new_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) throw JoinError(with_errno("cannot make a local socket"));
  return socket;
}

void wait_readable(int socket, Deadline deadline, const char* what) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd polled{socket, POLLIN, 0};
    const int ready = poll(&polled, 1, int(std::clamp<int64_t>(left.count(), 0, 1 << 30)));
    if (ready > 0) return;
    if (ready == 0) throw JoinError(std::string("the deadline passed while waiting for ") + what);
    if (errno != EINTR) throw JoinError(with_errno("cannot wait on a local socket"));
  }
}

bool somebody_listens(const Address& address) {
  const Descriptor probe = new_socket();
  return ::connect(probe.get(), address.get(), address.length) == 0;
}

}  // namespace

LocalSocket LocalSocket::connect(const std::string& text, Deadline deadline) {
  const Address address(text);
  while (true) {
    Descriptor socket = new_socket();
    if (::connect(socket.get(), address.get(), address.length) == 0) return LocalSocket(std::move(socket));
    const bool later = errno == ENOENT || errno == ECONNREFUSED || errno == EINTR || errno == EAGAIN;
    if (!later) throw JoinError(with_errno("cannot connect to " + text));
    if (std::chrono::steady_clock::now() >= deadline)
      throw JoinError("rank 0 did not listen at " + text + " before the deadline");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void LocalSocket::send(const std::string& bytes, const std::vector<int>& descriptors) const {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * max_descriptors)] = {};
  iovec content{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const size_t size = sizeof(int) * descriptors.size();
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(head), descriptors.data(), size);
  }
  if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) throw JoinError(with_errno("cannot send to a peer"));
}

Packet LocalSocket::receive(Deadline deadline) const {
  wait_readable(socket_.get(), deadline, "a peer's answer");
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * max_descriptors)];
  Packet packet;
  packet.bytes.resize(max_packet_bytes);
  iovec content{packet.bytes.data(), packet.bytes.size()};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t size = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (size < 0 && errno != ECONNRESET) throw JoinError(with_errno("cannot receive from a peer"));
  packet.bytes.resize(size > 0 ? size_t(size) : 0);
  if (size < 0) return packet;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t k = 0; k < count; ++k) {
      int number;
      std::memcpy(&number, CMSG_DATA(head) + k * sizeof(int), sizeof number);
      packet.descriptors.emplace_back(number);
    }
  }
  if (message.msg_flags & MSG_CTRUNC)
    throw JoinError("this process may not open enough descriptors for the group; raise `ulimit -n`");
  return packet;
}

bool LocalSocket::same_user() const {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

LocalListener::LocalListener(const std::string& text) : socket_(new_socket()) {
  const Address address(text);
  int bound = bind(socket_.get(), address.get(), address.length);
  if (bound != 0 && errno == EADDRINUSE && text[0] != '@' && !somebody_listens(address)) {
    unlink(text.c_str());  // left by a job that was killed
    bound = bind(socket_.get(), address.get(), address.length);
  }
  if (bound != 0) throw JoinError(with_errno("cannot listen at " + text));
  if (text[0] != '@') path_ = text;
  if (listen(socket_.get(), 128) != 0) throw JoinError(with_errno("cannot listen at " + text));
}

LocalListener::~LocalListener() {
  if (!path_.empty()) unlink(path_.c_str());
}

LocalSocket LocalListener::accept(Deadline deadline) const {
  while (true) {
    wait_readable(socket_.get(), deadline, "the other ranks to connect");
    Descriptor peer(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (peer) return LocalSocket(std::move(peer));
    if (errno == EMFILE || errno == ENFILE)
      throw JoinError("this process may not open enough descriptors for the group; raise `ulimit -n`");
    if (errno != EINTR && errno != ECONNABORTED) throw JoinError(with_errno("cannot accept a peer"));
  }
}

}  // namespace syncline
