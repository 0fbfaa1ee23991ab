#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#include "errors.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace syncline {

namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t mebibyte = uint64_t(1) << 20;

// Small blocks keep their pages when released: giving them back costs more than it frees.
constexpr uint64_t punch_from_bytes = 256 * 1024;

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

Descriptor memory_file() {
  int file = memfd_create("syncline", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (file < 0 && errno == EINVAL) file = memfd_create("syncline", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) throw std::runtime_error(with_errno("cannot make a shared memory file"));
  return Descriptor(file);
}

// Asking for more than RLIMIT_FSIZE would be answered with a signal, not an error.
uint64_t file_size_limit() {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? uint64_t(limit.rlim_cur) : UINT64_MAX;
}

uint64_t number_in(const char* path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : UINT64_MAX;
}

uint64_t available_in_machine() {
  std::ifstream file("/proc/meminfo");
  for (std::string key; file >> key; file.ignore(64, '\n')) {
    uint64_t kibibytes = 0;
    if (key == "MemAvailable:" && file >> kibibytes) return kibibytes * 1024;
  }
  return UINT64_MAX;
}

// A memory file has no size limit of its own, so filling it past what is there would wake the
// out-of-memory killer instead of failing.
uint64_t available_memory() {
  const uint64_t limit = number_in("/sys/fs/cgroup/memory.max");
  const uint64_t used = number_in("/sys/fs/cgroup/memory.current");
  const uint64_t in_group = limit == UINT64_MAX || used == UINT64_MAX ? UINT64_MAX : limit - std::min(used, limit);
  return std::min(in_group, available_in_machine());
}

}  // namespace

Mapping::Mapping(int file, uint64_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (address == MAP_FAILED)
    throw std::runtime_error(with_errno("cannot map " + std::to_string(bytes / mebibyte) + " MiB of shared memory"));
  data_ = static_cast<std::byte*>(address);
  bytes_ = bytes;
  // A wish, refused where shared huge pages are switched off.
  madvise(address, bytes, MADV_HUGEPAGE);
}

Mapping Mapping::borrow(const Mapping& lender) {
  Mapping mapping;
  mapping.data_ = lender.data_;
  mapping.bytes_ = lender.bytes_;
  mapping.borrowed_ = true;
  return mapping;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), borrowed_(other.borrowed_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(borrowed_, other.borrowed_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ && !borrowed_) munmap(data_, bytes_);
}

Arena::Arena(uint64_t wished_bytes, uint64_t reserved_bytes) : file_(memory_file()) {
  reserved_bytes = round_up(reserved_bytes, page);
  uint64_t bytes = round_up(std::min(std::max(wished_bytes, reserved_bytes), file_size_limit()), page);
  while (ftruncate(file_.get(), off_t(bytes)) != 0) {
    if (bytes / 2 < reserved_bytes) throw std::runtime_error(with_errno("cannot size a shared memory file"));
    bytes = round_up(bytes / 2, page);
  }
  for (;; bytes = round_up(bytes / 2, page)) {
    try {
      mapping_ = Mapping(file_.get(), bytes);
      break;
    } catch (const std::runtime_error&) {
      if (bytes / 2 < reserved_bytes) throw;
    }
  }
  // Peers trust the size they were told; a file that cannot shrink cannot make them fault.
  if (ftruncate(file_.get(), off_t(bytes)) != 0 ||
      fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw std::runtime_error(with_errno("cannot seal a shared memory file"));
  free_[reserved_bytes] = bytes - reserved_bytes;
  if (bytes == reserved_bytes) free_.clear();
  back(0, reserved_bytes);
}

bool Arena::contains(const void* pointer, uint64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(pointer);
  return first >= data() && first < data() + this->bytes() && bytes <= uint64_t(data() + this->bytes() - first);
}

uint64_t Arena::allocate(uint64_t bytes, uint64_t alignment) {
  if (alignment == 0 || (alignment & (alignment - 1)) != 0)
    throw std::invalid_argument("alignment " + std::to_string(alignment) + " is not a power of two; try 4096");
  if (!birthplace_.here()) throw std::logic_error("shared memory cannot be allocated in a forked child");
  bytes = round_up(std::max<uint64_t>(bytes, 1), 64);
  const std::lock_guard lock(mutex_);
  const uint64_t offset = take(bytes, std::max<uint64_t>(alignment, 64));
  try {
    back(offset, bytes);
  } catch (...) {
    give_back(offset, bytes);
    throw;
  }
  used_[offset] = bytes;
  return offset;
}

void Arena::release(uint64_t offset) {
  if (!birthplace_.here()) return;  // the memory is the parent's
  const std::lock_guard lock(mutex_);
  const auto block = used_.find(offset);
  if (block == used_.end())
    throw std::invalid_argument("no shared buffer starts at offset " + std::to_string(offset));
  const uint64_t bytes = block->second;
  used_.erase(block);
  const uint64_t first = round_up(offset, page);
  const uint64_t last = (offset + bytes) / page * page;
  if (last > first && last - first >= punch_from_bytes)
    fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(first), off_t(last - first));
  give_back(offset, bytes);
}

// First fit.
uint64_t Arena::take(uint64_t bytes, uint64_t alignment) {
  uint64_t largest = 0;
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const auto [start, size] = *block;
    const uint64_t offset = round_up(start, alignment);
    const uint64_t before = offset - start;
    largest = std::max(largest, size);
    if (size < before || size - before < bytes) continue;
    free_.erase(block);
    if (before > 0) free_[start] = before;
    if (size - before > bytes) free_[offset + bytes] = size - before - bytes;
    return offset;
  }
  throw Exhausted(bytes, largest,
                  "no room for a shared buffer of " + std::to_string(bytes) + " bytes: the largest free range of the " +
                      std::to_string(this->bytes()) + "-byte arena has " + std::to_string(largest) + " bytes");
}

void Arena::give_back(uint64_t offset, uint64_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

void Arena::back(uint64_t offset, uint64_t bytes) {
  const uint64_t available = available_memory();
  int error = bytes < available ? EINTR : ENOMEM;
  while (error == EINTR) error = posix_fallocate(file_.get(), off_t(offset), off_t(bytes));
  if (error != 0) {
    errno = error;
    throw Exhausted(bytes, available,
                    with_errno("no memory for a shared buffer of " + std::to_string(bytes) + " bytes, " +
                               std::to_string(available) + " bytes are available"));
  }
  const uint64_t first = offset / page * page;
  madvise(data() + first, round_up(offset + bytes, page) - first, MADV_POPULATE_WRITE);
}

Buffer::Buffer(std::shared_ptr<Arena> arena, uint64_t bytes)
    : arena_(std::move(arena)), bytes_(bytes), offset_(arena_->allocate(bytes)) {}

Buffer::~Buffer() { arena_->release(offset_); }

}  // namespace syncline
