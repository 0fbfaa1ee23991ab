#include "join.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "errors.h"
#include "local_socket.h"

namespace syncline {

namespace {

struct Hello {
  uint64_t magic = arena_magic;
  uint32_t version = abi_version;
  int32_t rank = 0;
  int32_t world = 0;
  int32_t pid = 0;
  Nonce nonce{};
  uint64_t arena_bytes = 0;
  uint64_t slot_bytes = 0;
  uint64_t piece_bytes = 0;
  uint64_t direct_from_bytes = 0;
};

struct Member {
  Hello hello;
  Descriptor arena;
  Descriptor lifeline;
  LocalSocket socket;
};

// Every answer starts with one of these; a refusal is followed by its reason.
constexpr char accepted = '+';
constexpr char refused = '-';

[[noreturn]] void refuse(const std::string& why) { throw JoinError("cannot form the group: " + why); }

std::string who(int rank) { return "rank " + std::to_string(rank); }

template <class T>
std::string bytes_of(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// An address space limit has to hold every rank's arena.
uint64_t wished_arena_bytes(const Settings& settings, int world) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return settings.arena_bytes;
  return std::min<uint64_t>(settings.arena_bytes, limit.rlim_cur / (uint64_t(world) + 1) / 2);
}

Descriptor own_lifeline(Descriptor* keeper) {
  Descriptor process(int(syscall(SYS_pidfd_open, getpid(), 0)));
  if (process) return process;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) refuse(with_errno("no lifeline"));
  *keeper = Descriptor(ends[1]);
  return Descriptor(ends[0]);
}

std::shared_ptr<Arena> make_arena(const Settings& settings, int rank, int world, const Nonce& nonce) {
  const Layout layout{settings.slot_bytes, settings.piece_bytes};
  auto arena = std::make_shared<Arena>(wished_arena_bytes(settings, world), layout.heap());
  new (arena->data() + Layout::control()) Control();
  auto* header = new (arena->data()) Header();
  header->version = abi_version;
  header->rank = rank;
  header->world = world;
  header->pid = getpid();
  header->arena_bytes = arena->bytes();
  header->nonce = nonce;
  header->magic.store(arena_magic, std::memory_order_release);
  return arena;
}

// A stranger is turned away and the group goes on waiting; a rank of ours with a mistake ends the joining.
bool is_stranger(const Hello& hello, const Hello& own) {
  return hello.magic != own.magic || hello.nonce != own.nonce;
}

void check_hello(const Hello& hello, const Hello& own, const std::vector<Member>& members) {
  if (hello.version != own.version)
    refuse(who(hello.rank) + " has version " + std::to_string(hello.version) + " of the shared memory layout and rank 0 " +
           std::to_string(own.version) + "; install the same release everywhere");
  if (hello.world != own.world)
    refuse(who(hello.rank) + " expects " + std::to_string(hello.world) + " ranks and rank 0 " +
           std::to_string(own.world));
  if (hello.rank < 0 || hello.rank >= own.world) refuse("there is no " + who(hello.rank) + " of " + std::to_string(own.world));
  if (hello.rank == 0 || members[hello.rank].socket) refuse("two processes say that they are " + who(hello.rank));
  if (hello.slot_bytes != own.slot_bytes || hello.piece_bytes != own.piece_bytes ||
      hello.direct_from_bytes != own.direct_from_bytes)
    refuse(who(hello.rank) + " has other slot, piece or direct sizes than rank 0");
}

bool admit(LocalSocket socket, const Hello& own, std::vector<Member>& members, Deadline deadline) {
  // Somebody who connects and says nothing must not use up the time of the others.
  const Deadline patience = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  Packet packet = socket.receive(std::min(deadline, patience));
  Hello hello;
  if (packet.bytes.size() != sizeof hello || packet.descriptors.size() != 2) return false;
  std::memcpy(&hello, packet.bytes.data(), sizeof hello);
  if (!socket.same_user() || is_stranger(hello, own)) {
    socket.send(refused + std::string("this address belongs to another job or another user"));
    return false;
  }
  try {
    check_hello(hello, own, members);
  } catch (const JoinError& error) {
    socket.send(refused + std::string(error.what()));
    throw;
  }
  Member& member = members[hello.rank];
  member.hello = hello;
  member.arena = std::move(packet.descriptors[0]);
  member.lifeline = std::move(packet.descriptors[1]);
  member.socket = std::move(socket);
  return true;
}

void tell_all(const std::vector<Member>& members, const std::string& text) {
  for (const Member& member : members) {
    try {
      if (member.socket) member.socket.send(text);
    } catch (const JoinError&) {
      // It is gone; its own absence is found later.
    }
  }
}

std::string missing_ranks(const std::vector<Member>& members) {
  std::string text;
  for (size_t rank = 1; rank < members.size(); ++rank)
    if (!members[rank].socket) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void gather_members(const std::string& address, std::vector<Member>& members, Deadline deadline) {
  const LocalListener listener(address);
  size_t present = 1;
  while (present < members.size()) {
    LocalSocket socket;
    try {
      socket = listener.accept(deadline);
    } catch (const JoinError& error) {
      refuse("ranks " + missing_ranks(members) + " did not appear: " + error.what());
    }
    present += admit(std::move(socket), members[0].hello, members, deadline);
  }
}

void send_members(const std::vector<Member>& members) {
  std::string bytes(1, accepted);
  std::vector<int> descriptors;
  for (const Member& member : members) {
    bytes += bytes_of(member.hello.arena_bytes);
    descriptors.push_back(member.arena.get());
    descriptors.push_back(member.lifeline.get());
  }
  for (size_t rank = 1; rank < members.size(); ++rank) members[rank].socket.send(bytes, descriptors);
}

Packet expect_accepted(Packet packet, const std::string& from) {
  if (packet.bytes.empty()) refuse(from + " hung up");
  if (packet.bytes[0] != accepted) throw JoinError(packet.bytes.substr(1));
  return packet;
}

void receive_members(const LocalSocket& socket, std::vector<Member>& members, Deadline deadline) {
  Packet packet = expect_accepted(socket.receive(deadline), "rank 0");
  if (packet.bytes.size() != 1 + members.size() * sizeof(uint64_t) || packet.descriptors.size() != 2 * members.size())
    refuse("rank 0 sent an incomplete list of members");
  for (size_t rank = 0; rank < members.size(); ++rank) {
    std::memcpy(&members[rank].hello.arena_bytes, packet.bytes.data() + 1 + rank * sizeof(uint64_t), sizeof(uint64_t));
    members[rank].arena = std::move(packet.descriptors[2 * rank]);
    members[rank].lifeline = std::move(packet.descriptors[2 * rank + 1]);
  }
}

Mapping map_member(const Member& member, int rank, int world, const Nonce& nonce) {
  Mapping mapping(member.arena.get(), member.hello.arena_bytes);
  const auto& header = *reinterpret_cast<const Header*>(mapping.data());
  if (header.magic.load(std::memory_order_acquire) != arena_magic || header.version != abi_version ||
      header.rank != rank || header.world != world || header.nonce != nonce || header.arena_bytes != mapping.bytes())
    refuse("the memory received for " + who(rank) + " is not the memory of " + who(rank));
  return mapping;
}

void map_members(Membership& membership, std::vector<Member>& members, const Nonce& nonce) {
  for (int rank = 0; rank < membership.world; ++rank) {
    const bool own = rank == membership.rank;
    membership.peers.push_back(own ? Mapping() : map_member(members[rank], rank, membership.world, nonce));
    membership.lifelines.push_back(own ? Descriptor() : std::move(members[rank].lifeline));
  }
}

void lead(const std::string& address, Membership& membership, std::vector<Member>& members, const Nonce& nonce,
          Deadline deadline) {
  try {
    gather_members(address, members, deadline);
    send_members(members);
    map_members(membership, members, nonce);
    for (int rank = 1; rank < membership.world; ++rank)
      expect_accepted(members[rank].socket.receive(deadline), who(rank));
  } catch (const std::exception& error) {
    tell_all(members, refused + std::string(error.what()));
    throw;
  }
  tell_all(members, std::string(1, accepted));
}

void follow(const std::string& address, Membership& membership, std::vector<Member>& members, const Nonce& nonce,
            Deadline deadline) {
  const LocalSocket leader = LocalSocket::connect(address, deadline);
  const Member& own = members[membership.rank];
  leader.send(bytes_of(own.hello), {own.arena.get(), own.lifeline.get()});
  receive_members(leader, members, deadline);
  try {
    map_members(membership, members, nonce);
  } catch (const std::exception& error) {
    leader.send(refused + who(membership.rank) + ": " + error.what());
    throw;
  }
  leader.send(std::string(1, accepted));
  expect_accepted(leader.receive(deadline), "rank 0");
}

Hello hello_of(const Membership& membership, const Nonce& nonce, const Settings& settings) {
  Hello hello;
  hello.rank = membership.rank;
  hello.world = membership.world;
  hello.pid = getpid();
  hello.nonce = nonce;
  hello.arena_bytes = membership.arena->bytes();
  hello.slot_bytes = settings.slot_bytes;
  hello.piece_bytes = settings.piece_bytes;
  hello.direct_from_bytes = settings.direct_from_bytes;
  return hello;
}

void check_request(int rank, int world, const Settings& settings) {
  if (world < 1 || world > max_world) refuse("a world of " + std::to_string(world) + " is not between 1 and 64");
  if (rank < 0 || rank >= world) refuse("there is no " + who(rank) + " of " + std::to_string(world));
  if (settings.slot_bytes % page_bytes != 0 || settings.piece_bytes % page_bytes != 0 || settings.piece_bytes == 0)
    refuse("slot_bytes and piece_bytes must be multiples of " + std::to_string(page_bytes));
}

}  // namespace

Membership join(const std::string& address, int rank, int world, const Nonce& nonce, const Settings& settings) {
  check_request(rank, world, settings);
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                std::chrono::duration<double>(settings.join_deadline_s));
  Membership membership;
  membership.rank = rank;
  membership.world = world;
  membership.arena = make_arena(settings, rank, world, nonce);
  std::vector<Member> members(world);
  members[rank].hello = hello_of(membership, nonce, settings);
  members[rank].arena = Descriptor(fcntl(membership.arena->file(), F_DUPFD_CLOEXEC, 0));
  members[rank].lifeline = own_lifeline(&membership.keeper);
  if (world == 1) {
    map_members(membership, members, nonce);
  } else if (rank == 0) {
    lead(address, membership, members, nonce, deadline);
  } else {
    follow(address, membership, members, nonce, deadline);
  }
  return membership;
}

std::vector<Membership> join_threads(int world, const Settings& settings) {
  check_request(0, world, settings);
  std::vector<Membership> all(world);
  for (int rank = 0; rank < world; ++rank) {
    all[rank].rank = rank;
    all[rank].world = world;
    all[rank].arena = make_arena(settings, rank, world, Nonce{});
    all[rank].lifelines.resize(world);
  }
  for (Membership& membership : all)
    for (const Membership& peer : all) membership.peers.push_back(Mapping::borrow(peer.arena->mapping()));
  return all;
}

}  // namespace syncline
