#include "agreement.h"

#include <cstring>
#include <vector>

#include "clock.h"
#include "errors.h"

namespace syncline {

namespace {

uint32_t hash_of(const std::string& label) {
  uint32_t hash = 2166136261u;
  for (const char letter : label) hash = (hash ^ uint8_t(letter)) * 16777619u;
  return hash;
}

uint64_t identity_of(const Call& call) {
  return uint64_t(call.kind) | uint64_t(call.dtype) << 8 | uint64_t(call.op) << 16 | uint64_t(call.root) << 24 |
         uint64_t(hash_of(call.label)) << 32;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t k = 0; k < ranks.size(); ++k) text += (k ? ", " : "") + std::to_string(ranks[k]);
  return text;
}

}  // namespace

void Agreement::announce(const Call& call, uint64_t offset) {
  Control& control = mesh_.own();
  control.descriptors[sequence_ % 2] = {identity_of(call), call.count, offset};
  char* label = control.labels[sequence_ % 2];
  std::memcpy(label, call.label.c_str(), call.label.size() + 1);
  mesh_.signal(&Control::announced, sequence_);
}

void Agreement::reach(const Call&) {
  mesh_.wait_for_all(&Control::announced, sequence_);
  for (int rank = 0; rank < mesh_.world(); ++rank)
    if (!same_as_mine(rank)) raise_desync();
  reached_ns_ = now_ns();
  mesh_.enter(Phase::agreed);
}

bool Agreement::all_shared() const {
  for (int rank = 0; rank < mesh_.world(); ++rank)
    if (offset(rank) == private_memory) return false;
  return true;
}

bool Agreement::all_private() const {
  for (int rank = 0; rank < mesh_.world(); ++rank)
    if (offset(rank) != private_memory) return false;
  return true;
}

bool Agreement::same_as_mine(int rank) const {
  const Announcement& mine = announcement(mesh_.rank());
  const Announcement& theirs = announcement(rank);
  return mine.identity == theirs.identity && mine.count == theirs.count;
}

std::string Agreement::said_by(int rank) const {
  const Announcement& said = announcement(rank);
  return describe(Kind(said.identity & 0xff), DataType(said.identity >> 8 & 0xff), ReduceOp(said.identity >> 16 & 0xff),
                  said.count, int(said.identity >> 24 & 0xff), mesh_.control(rank).labels[sequence_ % 2]);
}

// Every rank sees the difference by itself and none has touched any data, so the group goes on after it. Ranks that
// said the same stand together; the smallest party is to blame, and in a tie the later one.
void Agreement::raise_desync() {
  std::vector<std::pair<std::string, std::vector<int>>> parties;
  for (int rank = 0; rank < mesh_.world(); ++rank) {
    const std::string said = said_by(rank);
    size_t k = 0;
    while (k < parties.size() && parties[k].first != said) ++k;
    if (k == parties.size()) parties.push_back({said, {}});
    parties[k].second.push_back(rank);
  }
  std::string text = "ranks disagree about operation " + std::to_string(sequence_) + ": ";
  const std::vector<int>* minority = &parties[0].second;
  for (size_t k = 0; k < parties.size(); ++k) {
    text += (k ? "; " : "") + list_of(parties[k].second) + " called " + parties[k].first;
    if (parties[k].second.size() <= minority->size()) minority = &parties[k].second;
  }
  throw Desync(minority->front(), text);
}

}  // namespace syncline
