// What every rank finds at the start of every arena. All of it is shared between processes, so it is
// plain data and lock-free atomics, and every word that one rank writes while others read it has a
// cache line of its own (two, because some processors prefetch lines in pairs).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "types.h"

namespace syncline {

using Nonce = std::array<uint8_t, 16>;
constexpr size_t note_words = 4;
using Note = std::array<uint64_t, note_words>;

constexpr uint64_t arena_magic = 0x656e696c636e7973;  // "syncline"
constexpr uint32_t abi_version = 3;
constexpr size_t page_bytes = 4096;
constexpr size_t line_bytes = 128;

// Published last: whoever sees the magic sees the rest.
struct Header {
  std::atomic<uint64_t> magic;
  uint32_t version;
  int32_t rank;
  int32_t world;
  int32_t pid;
  uint64_t arena_bytes;
  Nonce nonce;
};

// What a rank is about to do. Two fit in one line with the sequence number that announces them.
struct Announcement {
  uint64_t identity;  // kind, type, reduction, root, hash of the label
  uint64_t count;
  uint64_t offset;  // of the buffer in this rank's arena, or private_memory
};
constexpr uint64_t private_memory = UINT64_MAX;

// The first failure of the group; only the one in the arena of rank 0 is used.
struct FailureRecord {
  std::atomic<uint64_t> state;
  char text[1016];
};

// Where in the sender's arena a message lies; see mailbox.h.
struct Envelope {
  uint64_t offset;
  uint64_t bytes;
};
constexpr size_t max_envelopes = 32;  // on their way from one rank to another
struct Post {
  Envelope envelopes[max_world][max_envelopes];
};

struct Control {
  // Monotonic words: announced counts operations, the staged ones count pieces, progress is the
  // sequence number of the operation in its upper half and a step of the schedule in its lower.
  alignas(line_bytes) std::atomic<uint64_t> announced;
  Announcement descriptors[2];
  alignas(line_bytes) std::atomic<uint64_t> staged_in;
  alignas(line_bytes) std::atomic<uint64_t> staged_out;
  alignas(line_bytes) std::atomic<uint64_t> done;
  std::atomic<uint64_t> not_finite;  // the last operation in which this rank computed an infinity or a NaN
  alignas(line_bytes) std::atomic<uint64_t> progress;

  // How many ranks sleep on one of the words above; only then does the writer call the kernel.
  alignas(line_bytes) std::atomic<uint32_t> sleepers;

  // What this rank waits for, so that others can find who really holds them up.
  alignas(line_bytes) std::atomic<uint64_t> waiting_for;  // 0, or 1 + rank, and the word's offset above bit 16
  std::atomic<uint64_t> waiting_value;
  std::atomic<uint64_t> heartbeat_ns;
  std::atomic<uint64_t> left;  // 1 once this rank has closed the group in good order

  std::atomic<uint64_t> note[note_words];  // what the rank says of itself; see Group::write_note

  // By rank: the number of the last message sent to it, and of the last taken from it.
  alignas(line_bytes) std::atomic<uint64_t> sent[max_world];
  alignas(line_bytes) std::atomic<uint64_t> taken[max_world];

  alignas(line_bytes) char labels[2][128];
  alignas(line_bytes) FailureRecord failure;
};

using Word = std::atomic<uint64_t> Control::*;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint64_t>) + 2 * sizeof(Announcement) <= 64, "one miss reads the announcement");

// Where things are in an arena: header page, control, envelopes, small slots, staging, then the heap of user buffers.
// Slots hold whole small messages; staging holds one piece of a large one. Both are double buffered.
struct Layout {
  uint64_t slot_bytes;
  uint64_t piece_bytes;

  static constexpr uint64_t control() { return page_bytes; }
  static constexpr uint64_t post() { return control() + 2 * page_bytes; }
  static constexpr uint64_t slots() { return post() + sizeof(Post); }
  uint64_t slot(uint64_t turn) const { return slots() + (turn % 2) * slot_bytes; }
  uint64_t staged(uint64_t turn) const { return slots() + 2 * slot_bytes + (turn % 2) * piece_bytes; }
  uint64_t result(uint64_t turn) const { return slots() + 2 * slot_bytes + (2 + turn % 2) * piece_bytes; }
  uint64_t heap() const { return slots() + 2 * slot_bytes + 4 * piece_bytes; }
};
static_assert(sizeof(Control) <= 2 * page_bytes && sizeof(Post) % page_bytes == 0);

}  // namespace syncline
