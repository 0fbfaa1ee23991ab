// The border between the native core and Python, and the only file that knows both.
// Arguments are named, the GIL is released around work, and src/syncline/_native.pyi mirrors this file.
// Pointers come as integers, from tensors that the caller keeps alive until the call or its handle is done.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "build_info.h"
#include "codec_kernels.h"
#include "digest_kernels.h"
#include "entries.h"
#include "group.h"
#include "halves.h"
#include "kernels.h"
#include "low_rank.h"
#include "selection.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace syncline;

namespace {

using Rows = nb::ndarray<const int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::shape<-1>>;
using Move = std::tuple<uintptr_t, uintptr_t, size_t>;  // to, from, how many elements
using Range = std::tuple<uintptr_t, size_t>;           // where it begins, how many bytes
using FourSizes = std::array<size_t, 4>;               // of a matrix: where it begins, rows, columns, factors
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

template <class T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// syncline.errors.<name>(rank, text)
void raise_with_rank(const char* name, const FabricError& error) {
  const nb::object kind = nb::module_::import_("syncline.errors").attr(name);
  PyErr_SetObject(kind.ptr(), nb::make_tuple(error.rank, error.what()).ptr());
}

void raise(const char* name, const std::exception& error) {
  PyErr_SetString(nb::module_::import_("syncline.errors").attr(name).ptr(), error.what());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const PeerLost& error) {
    raise_with_rank("PeerLost", error);
  } catch (const PeerStalled& error) {
    raise_with_rank("PeerStalled", error);
  } catch (const Desync& error) {
    raise("Desync", error);
  } catch (const Aborted& error) {
    raise_with_rank("PeerAborted", error);
  } catch (const CorruptMessage& error) {
    raise("CorruptMessage", error);
  } catch (const JoinError& error) {
    raise("JoinFailed", error);
  } catch (const Exhausted& error) {
    raise("OutOfSharedMemory", error);
  } catch (const std::invalid_argument& error) {
    raise("ConfigError", error);
  } catch (const std::logic_error& error) {
    raise("FabricClosed", error);
  }
}

// Ctrl-C, while a call waits.
void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void make_group(Group* group, const std::string& address, int rank, int world, nb::bytes nonce_bytes, double deadline_s,
                double join_deadline_s) {
  Nonce nonce;
  if (nonce_bytes.size() != nonce.size()) throw std::invalid_argument("a nonce has 16 bytes");
  std::memcpy(nonce.data(), nonce_bytes.c_str(), nonce.size());
  Settings settings;
  settings.deadline_s = deadline_s;
  settings.join_deadline_s = join_deadline_s;
  settings.check_signals = check_signals;
  const nb::gil_scoped_release released;
  new (group) Group(address, rank, world, nonce, settings);
}

// The array owns the buffer, so the memory lives as long as the tensor that is made of it.
Bytes make_buffer(Group& group, uint64_t bytes) {
  std::shared_ptr<Buffer> buffer;
  {
    const nb::gil_scoped_release released;
    buffer = group.buffer(bytes);
  }
  auto* owner = new std::shared_ptr<Buffer>(buffer);
  const nb::capsule capsule(owner, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<Buffer>*>(pointer); });
  return Bytes(buffer->data(), {bytes}, capsule);
}

Call reduce_call(uintptr_t data, uint64_t count, int dtype, int op, const std::string& label) {
  return {.kind = Kind::all_reduce, .output = at(data), .count = count, .dtype = DataType(dtype), .op = ReduceOp(op),
          .label = label};
}

Call schedule_call(Call call, const Rows& rows) {
  call.kind = Kind::schedule;
  call.program = reinterpret_cast<const Row*>(rows.data());
  call.rows = rows.shape(0);
  return call;
}

void run_schedule(Group& group, uintptr_t data, uint64_t count, int dtype, int op, const Rows& rows,
                  const std::string& label) {
  const nb::gil_scoped_release released;
  group.run(schedule_call(reduce_call(data, count, dtype, op, label), rows));
}

void bind_codecs(nb::module_& m) {
  m.def("take_quantized", [](uintptr_t scales, uintptr_t codes, uintptr_t values, uintptr_t noise, size_t count, size_t block, int bits) {
          take_quantized(codec_kernels(), at<float>(scales), at<uint8_t>(codes), at<float>(values), at<float>(noise), count, block, bits);
        }, "scales"_a, "codes"_a, "values"_a, "noise"_a, "count"_a, "block"_a, "bits"_a, ReleaseGil());
  m.def("dequantize", [](uintptr_t out, uintptr_t scales, uintptr_t codes, size_t count, size_t block, int bits, int how) {
          codec_kernels().dequantize(at<float>(out), at<float>(scales), at<uint8_t>(codes), count, block, bits, How(how));
        }, "out"_a, "scales"_a, "codes"_a, "count"_a, "block"_a, "bits"_a, "how"_a, ReleaseGil());
  m.def("add_residual", [](uintptr_t out, uintptr_t gradient, uintptr_t residual, size_t count) {
          return codec_kernels().add_residual(at<float>(out), at<float>(gradient), at<float>(residual), count);
        }, "out"_a, "gradient"_a, "residual"_a, "count"_a, ReleaseGil());
  m.def("take_signs", [](uintptr_t scales, uintptr_t bits, uintptr_t values, size_t count, size_t block) {
          take_signs(codec_kernels(), at<uint16_t>(scales), at<uint8_t>(bits), at<float>(values), count, block);
        }, "scales"_a, "bits"_a, "values"_a, "count"_a, "block"_a, ReleaseGil());
  m.def("unpack_signs", [](uintptr_t out, uintptr_t scales, uintptr_t bits, size_t count, size_t block, int how) {
          codec_kernels().unpack_signs(at<float>(out), at<uint16_t>(scales), at<uint8_t>(bits), count, block, How(how));
        }, "out"_a, "scales"_a, "bits"_a, "count"_a, "block"_a, "how"_a, ReleaseGil());
  m.def("select_largest", [](uintptr_t positions, uintptr_t values, size_t rows, size_t columns, size_t wanted) {
          select_largest(at<int64_t>(positions), at<float>(values), rows, columns, wanted);
        }, "positions"_a, "values"_a, "rows"_a, "columns"_a, "wanted"_a, ReleaseGil());
  m.def("entries_room", [](size_t count, size_t numel, int form) { return entries_room(count, numel, Form(form)); },
        "count"_a, "numel"_a, "form"_a);
  m.def("take_entries", [](uintptr_t message, uintptr_t values, size_t numel, uintptr_t positions, size_t count, int form) {
          return take_entries(at<uint8_t>(message), at<float>(values), numel, at<int64_t>(positions), count, Form(form));
        }, "message"_a, "values"_a, "numel"_a, "positions"_a, "count"_a, "form"_a, ReleaseGil());
  m.def("mean_of_entries", [](uintptr_t out, size_t numel, const std::vector<uintptr_t>& messages,
                              const std::vector<size_t>& bytes, int form) {
          std::vector<Message> all;
          for (size_t k = 0; k < messages.size(); ++k) all.push_back({at<uint8_t>(messages[k]), bytes.at(k)});
          mean_of_entries(at<float>(out), numel, all.data(), all.size(), Form(form));
        }, "out"_a, "numel"_a, "messages"_a, "bytes"_a, "form"_a, ReleaseGil());
}

ThinMatrices thin(const std::vector<FourSizes>& rows) {
  ThinMatrices matrices;
  for (const auto& [start, height, width, factors] : rows) matrices.push_back({start, {height, width}, factors});
  return matrices;
}

void bind_low_rank(nb::module_& m) {
  m.def("times_rights", [](uintptr_t lefts, uintptr_t values, const std::vector<FourSizes>& matrices, uintptr_t rights) {
          times_rights(low_rank_kernels(), at<float>(lefts), at<float>(values), thin(matrices), at<float>(rights));
        }, "lefts"_a, "values"_a, "matrices"_a, "rights"_a, ReleaseGil());
  m.def("take_rights", [](uintptr_t rights, uintptr_t values, const std::vector<FourSizes>& matrices, uintptr_t lefts) {
          take_rights(low_rank_kernels(), at<float>(rights), at<float>(values), thin(matrices), at<float>(lefts));
        }, "rights"_a, "values"_a, "matrices"_a, "lefts"_a, ReleaseGil());
  m.def("write_products", [](uintptr_t out, const std::vector<FourSizes>& matrices, uintptr_t lefts, uintptr_t rights) {
          write_products(low_rank_kernels(), at<float>(out), thin(matrices), at<float>(lefts), at<float>(rights));
        }, "out"_a, "matrices"_a, "lefts"_a, "rights"_a, ReleaseGil());
  m.def("orthonormalize", [](uintptr_t rows, const std::vector<std::array<size_t, 2>>& shapes) {
          std::vector<Factors> all;
          for (const auto& [count, length] : shapes) all.push_back({count, length});
          return orthonormalize_all(low_rank_kernels(), at<float>(rows), all);
        }, "rows"_a, "shapes"_a, ReleaseGil());
}

void bind_halves(nb::module_& m) {
  m.def("narrow", [](uintptr_t out, uintptr_t values, size_t count, int dtype) {
          narrow_buffer(at(out), at<float>(values), count, DataType(dtype));
        }, "out"_a, "values"_a, "count"_a, "dtype"_a, ReleaseGil());
  m.def("narrow_saturated", [](uintptr_t out, uintptr_t values, size_t count, int dtype) {
          narrow_saturated(at(out), at<float>(values), count, DataType(dtype));
        }, "out"_a, "values"_a, "count"_a, "dtype"_a, ReleaseGil());
  m.def("widen", [](uintptr_t out, uintptr_t halves, size_t count, int dtype) {
          return widen_buffer(at<float>(out), at(halves), count, DataType(dtype));
        }, "out"_a, "halves"_a, "count"_a, "dtype"_a, ReleaseGil());
  m.def("mean", [](uintptr_t out, const std::vector<uintptr_t>& rows, size_t count, int dtype) {
          std::vector<const void*> all;
          for (const uintptr_t row : rows) all.push_back(at(row));
          fold(at(out), all.data(), int(all.size()), count, DataType(dtype), ReduceOp::mean);
        }, "out"_a, "rows"_a, "count"_a, "dtype"_a, ReleaseGil());
}

void bind_group(nb::module_& m) {
  nb::class_<Handle>(m, "Handle")
      .def("wait", &Handle::wait, "seconds"_a = -1.0, ReleaseGil())
      .def("done", &Handle::done)
      .def("finite", [](const Handle& handle) {
             return handle.finite() == Finite::unknown ? nb::object(nb::none()) : nb::object(nb::bool_(handle.finite() == Finite::yes));
           }, nb::sig("def finite(self) -> bool | None"))
      .def("times", [](const Handle& handle) {
             const Times times = handle.times();
             return nb::make_tuple(times.began_ns, times.met_ns, times.ended_ns);
           }, nb::sig("def times(self) -> tuple[int, int, int]"));

  nb::class_<Group>(m, "Group")
      .def("__init__", &make_group, "address"_a, "rank"_a, "world"_a, "nonce"_a, "deadline_s"_a, "join_deadline_s"_a)
      .def("buffer", &make_buffer, "bytes"_a)
      .def("reaches", [](const Group& group, uintptr_t data, uint64_t bytes) { return group.reaches(at(data), bytes); },
           "data"_a, "bytes"_a)
      .def("barrier", &Group::barrier, ReleaseGil())
      .def("all_reduce", [](Group& group, uintptr_t data, uint64_t count, int dtype, int op, const std::string& label) {
             group.run(reduce_call(data, count, dtype, op, label));
           }, "data"_a, "count"_a, "dtype"_a, "op"_a, "label"_a = "", ReleaseGil())
      .def("run_schedule", &run_schedule, "data"_a, "count"_a, "dtype"_a, "op"_a, "rows"_a, "label"_a = "")
      .def("submit", [](Group& group, uintptr_t data, uint64_t count, int dtype, int op, const std::string& label) {
             return group.submit(reduce_call(data, count, dtype, op, label));
           }, "data"_a, "count"_a, "dtype"_a, "op"_a, "label"_a = "", ReleaseGil())
      .def("submit_schedule", [](Group& group, uintptr_t data, uint64_t count, int dtype, int op, const Rows& rows,
                                 const std::string& label) {
             return group.submit(schedule_call(reduce_call(data, count, dtype, op, label), rows));
           }, "data"_a, "count"_a, "dtype"_a, "op"_a, "rows"_a, "label"_a = "")
      .def("reduce_scatter", [](Group& group, uintptr_t input, uintptr_t output, uint64_t count, int dtype, int op,
                                const std::string& label) {
             group.reduce_scatter(at(input), at(output), count, DataType(dtype), ReduceOp(op), label);
           }, "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a, "label"_a = "", ReleaseGil())
      .def("all_gather", [](Group& group, uintptr_t input, uintptr_t output, uint64_t count, int dtype) {
             group.all_gather(at(input), at(output), count, DataType(dtype));
           }, "input"_a, "output"_a, "count"_a, "dtype"_a, ReleaseGil())
      .def("submit_all_gather", [](Group& group, uintptr_t input, uintptr_t output, uint64_t count, int dtype) {
             return group.submit({.kind = Kind::all_gather, .input = at(input), .output = at(output), .count = count,
                                  .dtype = DataType(dtype)});
           }, "input"_a, "output"_a, "count"_a, "dtype"_a, ReleaseGil())
      .def("submit_all_to_all", [](Group& group, uintptr_t input, uintptr_t output, uint64_t count, int dtype) {
             return group.submit({.kind = Kind::all_to_all, .input = at(input), .output = at(output), .count = count,
                                  .dtype = DataType(dtype)});
           }, "input"_a, "output"_a, "count"_a, "dtype"_a, ReleaseGil())
      .def("abort", &Group::abort, "why"_a, ReleaseGil())
      .def("broadcast", [](Group& group, uintptr_t data, uint64_t count, int dtype, int root) {
             group.broadcast(at(data), count, DataType(dtype), root);
           }, "data"_a, "count"_a, "dtype"_a, "root"_a, ReleaseGil())
      .def("all_to_all", [](Group& group, uintptr_t input, uintptr_t output, uint64_t count, int dtype) {
             group.all_to_all(at(input), at(output), count, DataType(dtype));
           }, "input"_a, "output"_a, "count"_a, "dtype"_a, ReleaseGil())
      .def("send", [](Group& group, uintptr_t data, uint64_t bytes, int to) { return group.send(at(data), bytes, to); },
           "data"_a, "bytes"_a, "to"_a, ReleaseGil())
      .def("receive", [](Group& group, uintptr_t data, uint64_t bytes, int source) {
             return group.receive(at(data), bytes, source);
           }, "data"_a, "bytes"_a, "source"_a, ReleaseGil())
      .def("wait_sent", &Group::wait_sent, "to"_a, "number"_a, "deadline_s"_a, ReleaseGil())
      .def("wait_received", &Group::wait_received, "source"_a, "number"_a, "deadline_s"_a, ReleaseGil())
      .def("unsynchronized_all_reduce", [](Group& group, uintptr_t data, uint64_t count, int dtype, int op) {
             group.unsynchronized_all_reduce(at(data), count, DataType(dtype), ReduceOp(op));
           }, "data"_a, "count"_a, "dtype"_a, "op"_a, ReleaseGil())
      .def("write_note", &Group::write_note, "numbers"_a)
      .def("note_of", &Group::note_of, "rank"_a)
      .def("suspect", &Group::suspect)
      .def("close", &Group::close, "drain"_a = true, ReleaseGil());
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of syncline.";
  nb::set_leak_warnings(false);  // a group that lives until the interpreter ends is no leak
  nb::register_exception_translator(translate);

  m.def("build_info", [] {
    const auto info = build_info();
    nb::dict result;
    result["compiler"] = info.compiler;
    result["cpp_standard"] = info.cpp_standard;
    result["simd"] = info.simd;
    return result;
  }, nb::sig("def build_info() -> dict[str, str]"));

  m.def("copy", [](const std::vector<Move>& moves, int dtype) {
    for (const auto& [out, in, count] : moves) copy_past_cache(at(out), at(in), count * size_of(DataType(dtype)));
  }, "moves"_a, "dtype"_a, ReleaseGil());
  m.def("divide", [](const std::vector<Move>& moves, int dtype, int divisor) {
    bool finite = true;
    for (const auto& [out, in, count] : moves)
      finite &= (out == in ? divide : divide_past_cache)(at(out), at(in), count, DataType(dtype), divisor);
    return finite;
  }, "moves"_a, "dtype"_a, "divisor"_a, ReleaseGil());
  m.def("digest", [](const std::vector<Range>& pieces, uint64_t first) {
    std::vector<Piece> all;
    for (const auto& [data, bytes] : pieces) all.push_back({at(data), bytes});
    return digest_pieces(digest_kernels(), all.data(), all.size(), first);
  }, "pieces"_a, "first"_a, ReleaseGil());
  bind_codecs(m);
  bind_low_rank(m);
  bind_halves(m);
  bind_group(m);
}
