#include "selection.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "codec_kernels.h"

namespace syncline {

namespace {

constexpr size_t small = 1 << 14;
constexpr size_t least_stride = 65;
constexpr size_t sample_size = 1 << 14;
constexpr int max_tries = 4;
constexpr uint32_t margin = 1 << 20;  // between the hint and the magnitude that it comes from: about a tenth

uint32_t magnitude_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

// A magnitude that about `wanted` of the values reach, and a few more: the sample is taken at an odd stride.
uint32_t guess(const float* values, size_t count, double wanted) {
  std::vector<uint32_t> sample;
  const size_t stride = std::max(least_stride, count / sample_size) | 1;
  for (size_t i = 0; i < count; i += stride) sample.push_back(magnitude_of(values[i]));
  const double expected = wanted / double(count) * double(sample.size());
  const size_t place = size_t(std::min(double(sample.size() - 1), expected + 3 * std::sqrt(expected) + 2));
  std::nth_element(sample.begin(), sample.begin() + long(place), sample.end(), std::greater<>());
  return sample[place];
}

// Chooses from one row after another. Candidates are positions that hold all of the largest, and as few others as a guess
// allows; the guess for a row is what was the smallest choice of the row before.
class Selection {
 public:
  Selection(size_t count, size_t wanted) : count_(count), wanted_(wanted) {}

  void choose(int64_t* positions, const float* values, int64_t first) {
    find_candidates(values);
    sizes_.resize(found_.size());
    for (size_t i = 0; i < found_.size(); ++i) sizes_[i] = magnitude_of(values[found_[i]]);
    ordered_ = sizes_;
    std::nth_element(ordered_.begin(), ordered_.begin() + long(wanted_ - 1), ordered_.end(), std::greater<>());
    const uint32_t least = ordered_[wanted_ - 1];
    size_t equal = wanted_;  // how many of the smallest chosen size there is room for
    for (size_t i = 0; i < wanted_; ++i) equal -= ordered_[i] > least;
    for (size_t i = 0; i < found_.size(); ++i) {
      if (sizes_[i] < least || (sizes_[i] == least && equal == 0)) continue;
      equal -= sizes_[i] == least;
      *positions++ = first + found_[i];
    }
    hint_ = least - std::min(least, margin);
  }

 private:
  void find_candidates(const float* values) {
    if (hint_ != 0 && collect(values, count_, hint_)) return;
    const size_t room = std::min(count_, 3 * wanted_ + 4096);
    double aim = double(wanted_);
    for (int attempt = 0; attempt < max_tries && count_ > small && wanted_ < count_ / 4; ++attempt) {
      const bool enough = collect(values, room, guess(values, count_, aim));
      const bool full = found_.size() >= room - 32;
      if (enough && !full) return;
      aim *= full ? 0.7 : 1.5;
    }
    found_.resize(count_);
    for (size_t i = 0; i < count_; ++i) found_[i] = uint32_t(i);
  }

  // Whether there are as many as wanted.
  bool collect(const float* values, size_t room, uint32_t least) {
    found_.resize(room);
    found_.resize(codec_kernels().collect(found_.data(), room, values, count_, least));
    return found_.size() >= wanted_;
  }

  size_t count_, wanted_;
  uint32_t hint_ = 0;
  std::vector<uint32_t> found_, sizes_, ordered_;
};

}  // namespace

void select_largest(int64_t* positions, const float* values, size_t rows, size_t columns, size_t wanted) {
  if (wanted == 0) return;
  Selection selection(columns, wanted);
  for (size_t row = 0; row < rows; ++row)
    selection.choose(positions + row * wanted, values + row * columns, int64_t(row * columns));
}

}  // namespace syncline
