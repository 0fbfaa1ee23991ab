#include "codec_kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <cstring>
#include <memory>
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

float widened(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A message as it comes from others: scales, then codes. Of any bytes, so that there are scales that are not finite, in a
// buffer of exactly its length, so that the address sanitizer sees every byte beyond.
template <class Scale>
struct AnyMessage {
  AnyMessage(size_t count, size_t block, int bits, Random& random)
      : head((count + block - 1) / block * sizeof(Scale)),
        bytes(head + (count * size_t(bits) + 7) / 8),
        data(new uint8_t[bytes]) {
    for (size_t i = 0; i < bytes; ++i) data[i] = uint8_t(random.next());
    for (size_t i = 0; i < head; i += sizeof(Scale)) {
      constexpr float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, 1e-45f, 0.0f};
      const auto* upper = reinterpret_cast<const uint8_t*>(odd + random.below(6)) + sizeof(float) - sizeof(Scale);
      if (random.below(2) == 0) std::memcpy(data.get() + i, upper, sizeof(Scale));
    }
  }
  const Scale* scales() const { return reinterpret_cast<const Scale*>(data.get()); }
  const uint8_t* codes() const { return data.get() + head; }

  size_t head, bytes;
  std::unique_ptr<uint8_t[]> data;
};

float applied(float before, float decoded, How how) {
  return how == How::write ? decoded : how == How::add ? before + decoded : before - decoded;
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Decodes into memory of exactly `count` values, and compares with what `expected(i)` says of each.
void check_decoder(size_t count, const std::function<void(float*, How)>& decode, const std::function<float(size_t)>& expected) {
  const auto before = noise(count, 7);
  for (const How how : {How::write, How::add, How::subtract}) {
    const std::unique_ptr<float[]> out(new float[count]);
    std::copy(before.begin(), before.end(), out.get());
    decode(out.get(), how);
    for (size_t i = 0; i < count; ++i)
      CHECK(same(out[i], applied(before[i], expected(i), how)), "%zu of %zu", i, count);
  }
}

// What `take(scales, codes, rest)` leaves of values is what `decode(said, scales, codes)` does not say of them.
template <class Scale, class Take, class Decode>
void check_taken(size_t count, size_t block, int bits, const Take& take, const Decode& decode) {
  const auto values = noise(count, unsigned(count));
  std::vector<float> rest = values, said(count);
  std::vector<Scale> scales((count + block - 1) / block);
  std::vector<uint8_t> codes((count * size_t(bits) + 7) / 8);
  take(scales.data(), codes.data(), rest.data());
  decode(said.data(), scales.data(), codes.data());
  for (size_t i = 0; i < count; ++i) CHECK(rest[i] == values[i] - said[i], "%zu of %zu", i, count);
}

// Around the blocks, and around what kernels take at a time.
const size_t awkward[] = {0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 257, 4095, 4096, 4097, 8191, 8193, 20'001};

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
        std::vector<uint16_t> scales((count + block - 1) / block);
        std::vector<float> back(count);
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
          const float scale = widened(scales[at / block]);
          const double mean = sum / double(end - at);
          CHECK(std::fabs(scale - mean) <= 0.0040 * mean, "a bfloat16 has 8 bits, so rounding is off by up to 1/256");
          for (size_t i = at; i < end; ++i) CHECK(back[i] == (values[i] >= 0 ? scale : -scale));
        }
      }
  });
}

TEST(any_quantized_message_is_decoded_in_bounds) {
  Random random(1);
  for_each_table([&](const CodecTable& table) {
    for (const int bits : {8, 4})
      for (const size_t block : {8, 64, 256, 5000})
        for (const size_t count : awkward) {
          const AnyMessage<float> message(count, block, bits, random);
          const auto decode = [&](float* out, How how) {
            table.dequantize(out, message.scales(), message.codes(), count, block, bits, how);
          };
          check_decoder(count, decode, [&](size_t i) {
            const int half = message.codes()[i * size_t(bits) / 8] >> (i % 2 * 4) & 15;
            const int code = bits == 8 ? int8_t(message.codes()[i]) : half > 7 ? half - 16 : half;
            return float(code) * message.scales()[i / block];
          });
        }
  });
}

TEST(any_message_of_signs_is_decoded_in_bounds) {
  Random random(2);
  for_each_table([&](const CodecTable& table) {
    for (const size_t block : {8, 32, 512, 5000})
      for (const size_t count : awkward) {
        const AnyMessage<uint16_t> message(count, block, 1, random);
        const auto decode = [&](float* out, How how) {
          table.unpack_signs(out, message.scales(), message.codes(), count, block, how);
        };
        check_decoder(count, decode, [&](size_t i) {
          const float scale = widened(message.scales()[i / block]);
          return message.codes()[i / 8] >> (i % 8) & 1 ? scale : -scale;
        });
      }
  });
}

TEST(what_is_taken_is_in_the_message_and_nothing_is_out_of_bounds) {
  for_each_table([](const CodecTable& table) {
    for (const size_t block : {8, 32, 256, 16'384})
      for (const size_t count : awkward) {
        for (const int bits : {8, 4})
          check_taken<float>(
              count, block, bits,
              [&](float* scales, uint8_t* codes, float* rest) {
                take_quantized(table, scales, codes, rest, nullptr, count, block, bits);
              },
              [&](float* said, const float* scales, const uint8_t* codes) {
                table.dequantize(said, scales, codes, count, block, bits, How::write);
              });
        check_taken<uint16_t>(
            count, block, 1,
            [&](uint16_t* scales, uint8_t* codes, float* rest) { take_signs(table, scales, codes, rest, count, block); },
            [&](float* said, const uint16_t* scales, const uint8_t* codes) {
              table.unpack_signs(said, scales, codes, count, block, How::write);
            });
      }
  });
}

// Any finite numbers: of all exponents, denormal, zero, equal.
TEST(all_instruction_sets_write_the_same_messages) {
  int num_tables = 0;
  const CodecTable* const* tables = codec_tables(&num_tables);
  Random random(3);
  for (const size_t block : {8, 24, 256, 5000})
    for (const size_t count : awkward) {
      std::vector<float> values(count), drawn(count);
      for (float& value : values) {
        const uint32_t bits = uint32_t(random.next() >> 32);
        std::memcpy(&value, &bits, sizeof bits);
        if (!std::isfinite(value) || random.below(4) == 0) value = random.below(2) ? -0.0f : 1.5f;
      }
      for (float& draw : drawn) draw = float(random.uniform()) * 0.99f;
      const auto all_of_them = [&](const CodecTable& table) {
        std::vector<uint8_t> made;
        const size_t blocks = (count + block - 1) / block;
        std::vector<float> scales(blocks);
        std::vector<uint16_t> magnitudes(blocks);
        std::vector<uint8_t> codes(count);
        const auto add = [&](const void* from, size_t bytes) {
          const auto* data = static_cast<const uint8_t*>(from);
          made.insert(made.end(), data, data + bytes);
        };
        for (const int bits : {8, 4})
          for (const float* noise : {static_cast<const float*>(nullptr), static_cast<const float*>(drawn.data())}) {
            table.quantize(scales.data(), codes.data(), values.data(), noise, count, block, bits);
            add(scales.data(), blocks * sizeof(float));
            add(codes.data(), (count * size_t(bits) + 7) / 8);
          }
        table.pack_signs(magnitudes.data(), codes.data(), values.data(), count, block);
        add(magnitudes.data(), blocks * sizeof(uint16_t));
        add(codes.data(), (count + 7) / 8);
        return made;
      };
      const auto first = all_of_them(*tables[0]);
      for (int k = 1; k < num_tables; ++k) CHECK(all_of_them(*tables[k]) == first, "table %d, %zu of %zu", k, count, block);
    }
}
