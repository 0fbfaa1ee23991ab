#include "codec_kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <cstring>
#include <random>
#include <vector>

#include "harness.h"

using namespace syncline;
using namespace syncline::test;

namespace {

template <class Body>
void for_each_table(const Body& body) {
  int num_tables = 0;
  const CodecTable* const* tables = codec_tables(&num_tables);
  for (int k = 0; k < num_tables; ++k) body(*tables[k]);
}

std::vector<float> noise(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

const size_t lengths[] = {0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 5000};

// Adding and taking away is what it is when it is done after decoding.
void check_other_ways(const std::vector<float>& decoded, const std::function<void(float*, How)>& decode) {
  const auto start = noise(decoded.size(), 99);
  auto more = start, less = start;
  decode(more.data(), How::add);
  decode(less.data(), How::subtract);
  for (size_t i = 0; i < start.size(); ++i) {
    CHECK(more[i] == start[i] + decoded[i]);
    CHECK(less[i] == start[i] - decoded[i]);
  }
}

}  // namespace

TEST(quantized_values_are_within_half_a_step) {
  for_each_table([](const CodecTable& table) {
    for (const int bits : {8, 4})
      for (const size_t block : {8, 64, 256})
        for (const size_t count : lengths) {
          const auto values = noise(count, unsigned(count));
          std::vector<float> scales((count + block - 1) / block), back(count);
          std::vector<uint8_t> codes((count * size_t(bits) + 7) / 8);
          table.quantize(scales.data(), codes.data(), values.data(), nullptr, count, block, bits);
          table.dequantize(back.data(), scales.data(), codes.data(), count, block, bits, How::write);
          check_other_ways(back, [&](float* out, How how) {
            table.dequantize(out, scales.data(), codes.data(), count, block, bits, how);
          });
          for (size_t i = 0; i < count; ++i)
            CHECK(std::fabs(back[i] - values[i]) <= 0.5001f * scales[i / block], "%zu of %zu, %d bits", i, count, bits);
        }
  });
}

TEST(signs_and_magnitudes_come_back) {
  for_each_table([](const CodecTable& table) {
    for (const size_t block : {8, 64, 512})
      for (const size_t count : lengths) {
        auto values = noise(count, unsigned(count));
        if (count > 3) values[1] = 0.0f, values[2] = -0.0f;
        std::vector<float> scales((count + block - 1) / block), back(count);
        std::vector<uint8_t> bits((count + 7) / 8);
        table.pack_signs(scales.data(), bits.data(), values.data(), count, block);
        table.unpack_signs(back.data(), scales.data(), bits.data(), count, block, How::write);
        check_other_ways(back, [&](float* out, How how) {
          table.unpack_signs(out, scales.data(), bits.data(), count, block, how);
        });
        for (size_t at = 0; at < count; at += block) {
          double sum = 0;
          const size_t end = std::min(count, at + block);
          for (size_t i = at; i < end; ++i) sum += std::fabs(values[i]);
          CHECK(std::fabs(scales[at / block] - sum / double(end - at)) <= 1e-5);
          for (size_t i = at; i < end; ++i) CHECK(back[i] == (values[i] >= 0 ? scales[at / block] : -scales[at / block]));
        }
      }
  });
}
