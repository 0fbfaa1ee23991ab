// The vocabulary of an operation: element types, reductions, and the call itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace syncline {

constexpr int max_world = 64;

enum class DataType : uint8_t { float32, float64, float16, bfloat16, int32, int64, byte };
enum class ReduceOp : uint8_t { sum, max, mean };
enum class Kind : uint8_t {
  barrier, all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, schedule,
  send, expect, await_sent, await_received,
};
constexpr bool is_message(Kind kind) { return kind >= Kind::send; }

size_t size_of(DataType);
const char* name_of(DataType);
const char* name_of(ReduceOp);
const char* name_of(Kind);

// One row of a compiled schedule; see schedule.h for the opcodes.
struct Row {
  int64_t opcode, a, b, c, d;
};

// One operation, the same on every rank but for the pointers and the program.
//
//   kind            input                  output                 count
//   barrier         -                      -                      -
//   all_reduce      -                      in place, count        elements
//   reduce_scatter  world * count          count                  elements of one rank's result
//   all_gather      count                  world * count          elements of one rank's contribution
//   broadcast       -                      in place, count        elements
//   all_to_all      world * count          world * count          elements of one block
//   schedule        -                      in place, count        elements
//
// Messages are between two ranks; the other one is `root`:
//
//   send            -                      count                  bytes
//   expect          -                      count                  bytes
//   await_sent      -                      -                      number of the message
//   await_received  -                      -                      number of the message
struct Call {
  Kind kind = Kind::barrier;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
  DataType dtype = DataType::float32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::string label{};           // compared between ranks and shown in errors, at most 127 bytes; may be empty
  const Row* program = nullptr;  // schedule only; must live until the operation is done
  size_t rows = 0;
  double deadline_s = 0;         // longest wait without progress; 0 means the group's own
};

// "all_reduce(sum, float32[1000003])"
std::string describe(Kind, DataType, ReduceOp, uint64_t count, int root, const std::string& label);
std::string describe(const Call&);

// Throws std::invalid_argument when the call is impossible in a world of this size.
void validate(const Call&, int world);

}  // namespace syncline
