// Memory that peers can reach.
//
// An Arena is one sparse memory file per rank, mapped once by every rank when the group forms. A
// buffer made later is a range of it, so peers reach it by (rank, offset) with no further handshake.
// The file has no name: when the last process that holds it ends, however it ends, it is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "descriptor.h"
#include "forked.h"

namespace syncline {

// A mapping of somebody's arena.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int file, uint64_t bytes);  // throws std::runtime_error
  static Mapping borrow(const Mapping&);  // the same memory, which the lender must keep
  Mapping(Mapping&&) noexcept;
  Mapping& operator=(Mapping&&) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  bool borrowed_ = false;
};

class Arena {
 public:
  // `reserved_bytes` at the start are backed at once and never handed out. The address space asked for
  // is a wish: it is halved until the limits of this process allow it.
  Arena(uint64_t wished_bytes, uint64_t reserved_bytes);

  // Throws Exhausted. The memory is backed when this returns, so touching it cannot fail later.
  uint64_t allocate(uint64_t bytes, uint64_t alignment = 4096);
  void release(uint64_t offset);

  const Mapping& mapping() const { return mapping_; }
  int file() const { return file_.get(); }
  uint64_t bytes() const { return mapping_.bytes(); }
  std::byte* data() const { return mapping_.data(); }
  bool contains(const void* pointer, uint64_t bytes) const;
  uint64_t offset_of(const void* pointer) const { return static_cast<const std::byte*>(pointer) - data(); }

 private:
  uint64_t take(uint64_t bytes, uint64_t alignment);
  void give_back(uint64_t offset, uint64_t bytes);
  void back(uint64_t offset, uint64_t bytes);

  Birthplace birthplace_;
  Descriptor file_;
  Mapping mapping_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes, never adjacent
  std::map<uint64_t, uint64_t> used_;  // offset -> bytes
};

// A buffer in an arena; it keeps the arena alive, even after its group is closed.
class Buffer {
 public:
  Buffer(std::shared_ptr<Arena> arena, uint64_t bytes);
  Buffer(const Buffer&) = delete;
  ~Buffer();

  void* data() const { return arena_->data() + offset_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Arena> arena_;
  uint64_t bytes_;
  uint64_t offset_;
};

}  // namespace syncline
