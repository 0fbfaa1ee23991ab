// What can go wrong, split by what the caller can do about it.
//
//   FabricError            a peer failed; the group is broken and the data of the operation is to be discarded
//     PeerLost               the process of `rank` ended
//     PeerStalled            `rank` did not answer before the deadline
//     Desync                 ranks called different operations; `rank` is of the minority. Nothing was done, and the
//                            group goes on
//     Aborted                `rank` gave up for a reason of its own (interrupted, closed, out of memory)
//   CorruptMessage         what a codec received is not what a codec sends; nothing was written
//   JoinError              the ranks could not form a group
//   Exhausted              there is no memory for a shared buffer; nothing else changed
//   std::invalid_argument  the request is impossible; nothing was sent
//   std::logic_error       the group is closed, or used in a forked child
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace syncline {

struct FabricError : std::runtime_error {
  FabricError(int rank, const std::string& text) : std::runtime_error(text), rank(rank) {}
  int rank;
};

struct PeerLost : FabricError { using FabricError::FabricError; };
struct PeerStalled : FabricError { using FabricError::FabricError; };
struct Desync : FabricError { using FabricError::FabricError; };
struct Aborted : FabricError { using FabricError::FabricError; };

struct CorruptMessage : std::runtime_error { using std::runtime_error::runtime_error; };
struct JoinError : std::runtime_error { using std::runtime_error::runtime_error; };

struct Exhausted : std::runtime_error {
  Exhausted(uint64_t asked, uint64_t available, const std::string& text)
      : std::runtime_error(text), asked_bytes(asked), available_bytes(available) {}
  uint64_t asked_bytes;
  uint64_t available_bytes;
};

// "text: No such file or directory", from errno.
std::string with_errno(const std::string& text);

}  // namespace syncline
