#include "types.h"

#include <stdexcept>

#include "schedule.h"

namespace syncline {

size_t size_of(DataType dtype) {
  switch (dtype) {
    case DataType::float64:
    case DataType::int64: return 8;
    case DataType::float32:
    case DataType::int32: return 4;
    case DataType::float16:
    case DataType::bfloat16: return 2;
    case DataType::byte: return 1;
  }
  throw std::invalid_argument("unknown data type " + std::to_string(int(dtype)));
}

const char* name_of(DataType dtype) {
  switch (dtype) {
    case DataType::float32: return "float32";
    case DataType::float64: return "float64";
    case DataType::float16: return "float16";
    case DataType::bfloat16: return "bfloat16";
    case DataType::int32: return "int32";
    case DataType::int64: return "int64";
    case DataType::byte: return "byte";
  }
  return "unknown type";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::max: return "max";
    case ReduceOp::mean: return "mean";
  }
  return "unknown reduction";
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::barrier: return "barrier";
    case Kind::all_reduce: return "all_reduce";
    case Kind::reduce_scatter: return "reduce_scatter";
    case Kind::all_gather: return "all_gather";
    case Kind::broadcast: return "broadcast";
    case Kind::all_to_all: return "all_to_all";
    case Kind::schedule: return "all_reduce";
    case Kind::send: return "send to rank ";
    case Kind::expect: return "receive from rank ";
    case Kind::await_sent: return "message to rank ";
    case Kind::await_received: return "message from rank ";
  }
  return "unknown operation";
}

namespace {

bool reduces(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::schedule; }
bool has_input(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_gather || kind == Kind::all_to_all;
}

}  // namespace

std::string describe(Kind kind, DataType dtype, ReduceOp op, uint64_t count, int root,
                     const std::string& label) {
  if (is_message(kind)) return name_of(kind) + std::to_string(root);
  std::string text = std::string(name_of(kind)) + "(";
  if (reduces(kind)) text += std::string(name_of(op)) + ", ";
  if (kind != Kind::barrier) text += std::string(name_of(dtype)) + "[" + std::to_string(count) + "]";
  if (kind == Kind::broadcast) text += ", root " + std::to_string(root);
  if (!label.empty()) text += ", " + label;
  return text + ")";
}

std::string describe(const Call& call) {
  return describe(call.kind, call.dtype, call.op, call.count, call.root, call.label);
}

void validate(const Call& call, int world) {
  const auto refuse = [&](const std::string& why) { throw std::invalid_argument(describe(call) + ": " + why); };
  if (call.label.size() > 127) refuse("a label has at most 127 bytes");
  if (call.kind == Kind::barrier) return;
  if (call.count > UINT64_MAX / size_of(call.dtype) / max_world) refuse("the count overflows");
  if (reduces(call.kind) && call.dtype == DataType::byte) refuse("bytes can be moved but not reduced");
  if (call.root < 0 || call.root >= world) refuse("the root is not below the world size " + std::to_string(world));
  if (call.kind == Kind::await_sent || call.kind == Kind::await_received) return;
  if (call.count > 0 && call.output == nullptr) refuse("the output is a null pointer");
  if (call.count > 0 && has_input(call.kind) && call.input == nullptr) refuse("the input is a null pointer");
  if (call.kind == Kind::schedule) validate_program(call, world);
}

}  // namespace syncline
