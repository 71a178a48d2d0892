// SPDX-License-Identifier: Apache-2.0
// Readers release the GIL while they read and wait; arrays passed to Python are copies.
#include "callgate/stream.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "channel/outfeed_2020.h"
#include "channel/stream_address.h"
#include "channel/stream_sink.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate::bindings {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

nb::object copy_of(const char* data, const std::vector<std::int64_t>& dims, DType dtype) {
  return make_copy(
      {const_cast<char*>(data), dims.data(), static_cast<std::int32_t>(dims.size()), dtype});
}

nb::object leaf_array(const stream::Record& record, const stream::Leaf& leaf) {
  std::optional<DType> dtype = dtype_from_code(static_cast<int>(leaf.code & 0xFFFFU));
  // The file states both; its frames have been checked with the element size.
  bool known = dtype && leaf.code <= 0xFFFFU && bits(*dtype) == static_cast<int>(leaf.bits) &&
               name(*dtype) == leaf.dtype;
  // Otherwise as bytes. callgate._stream converts packed elements to arrays.
  if (!known || is_packed(*dtype))
    return copy_of(record.data(leaf), {static_cast<std::int64_t>(leaf.nbytes)}, DType::kU8);
  return copy_of(record.data(leaf), leaf.dims, *dtype);
}

// Text of a file; invalid UTF-8 is replaced.
nb::object utf8(const std::string& text) {
  return taken(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::dict source_dict(const stream::Source& source, std::int32_t process_index) {
  nb::list leaves, levels;
  for (const stream::Leaf& leaf : source.leaves)
    leaves.append(
        nb::make_tuple(utf8(leaf.path), utf8(leaf.dtype), leaf.bits, tuple_of(leaf.dims)));
  for (const stream::Level& level : source.levels)
    levels.append(nb::make_tuple(level.size, utf8(level.mask)));
  // The process's index is the describing session's; -1 if unknown.
  return dict_of("id", source.id, "name", utf8(source.name), "description",
                 utf8(source.description), "role", source.role, "levels", levels, "leaves", leaves,
                 "value_leaves", source.value_leaves, "has_where", source.has_where,
                 "process_index", process_index);
}

// A reader that one thread uses at a time. A second thread gets an error, but may close the reader,
// which ends the first one's wait. Only the using thread accesses the members, except those that
// are `Shared` or guarded.
class StreamReader : Immovable {
 public:
  explicit StreamReader(std::string of) : address(std::move(of)) {
    StreamAddress parsed = parse_stream_address(address);
    is_file_ = parsed.transport == StreamTransport::kFile;
    if (is_file_) {
      reader_ = outside([&] { return std::make_unique<stream::Reader>(parsed.path); });
      return;
    }
    int fd = -1;
    while ((fd = outside([&] { return connect_stream(parsed).release(); })) < 0)
      if (PyErr_CheckSignals() != 0)
        nb::raise_python_error();  // otherwise a signal only ended the wait
    reader_ = outside([&] {
      make_nonblocking(fd);
      return std::make_unique<stream::Reader>(fd);
    });
  }

  // At most `limit` available records; waits for the first one.
  nb::list read(double timeout, std::size_t limit) {
    Use use(*this);
    auto deadline = Clock::now() + seconds_of(std::min(timeout, 1e9));
    nb::list records;
    while (records.size() < limit) {
      std::optional<stream::Record> record;
      try {
        record = outside([&] { return reader_->next(); });
      } catch (const stream::RefusedError& error) {
        raise(PyExc_ConnectionError, "callgate.open_stream: " + address +
                                         ": the writer refused the connection: " + error.what());
      } catch (const Error&) {
        if (records.empty()) throw;
        break;  // first the records before the damage; the next call meets it again
      }
      note_state();
      if (record) {
        records.append(tuple_of(*record));
        continue;
      }
      auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
      if (!records.empty() || (ended && !is_file_) || left.count() <= 0) break;
      without_gil([&] {
        if (is_file_) return std::this_thread::sleep_for(std::min(left, milliseconds(20)));
        pollfd polled{reader_->fd(), POLLIN, 0};
        poll(&polled, 1, static_cast<int>(std::min(left, milliseconds(100)).count()));
      });
      if (PyErr_CheckSignals() != 0) nb::raise_python_error();
      if (close_requested_) refuse("it has been closed");
    }
    return records;
  }

  // Reads all available records, only for their descriptions.
  void scan() {
    Use use(*this);
    outside([&] {
      while (reader_->next()) remember_sources();
      remember_sources();
    });
    note_state();
  }

  // The sources of this session, and of earlier ones that scan() met.
  nb::list sources() {
    Use use(*this);
    remember_sources();
    nb::list dicts;
    for (const Seen& seen : seen_) dicts.append(source_dict(*seen.source, seen.process_index));
    return dicts;
  }

  void close() {
    nb::ft_lock_guard lock(mutex_);
    close_requested_ = true;
    if (!in_use_) reader_.reset();
  }

  const std::string address;
  // Known without the reader, for any thread.
  Shared<bool> closed{false}, ended{false};
  Shared<std::uint64_t> offset{0};
  Shared<std::uint32_t> process{0};

 private:
  struct Seen {
    std::shared_ptr<const stream::Source> source;
    std::int32_t process_index;
    nb::object dict;  // of its records, from the first one on
  };

  // The time during which a thread uses the reader.
  struct Use : Immovable {
    explicit Use(StreamReader& of) : reader(of) {
      nb::ft_lock_guard lock(reader.mutex_);
      if (reader.close_requested_) reader.refuse("it has been closed");
      if (!reader.is_file_ && !reader.opened_in_.here())
        reader.refuse("its connection belongs to the process that this one was forked from");
      if (reader.in_use_) reader.refuse("another thread is reading it");
      reader.in_use_ = true;
    }
    ~Use() {
      nb::ft_lock_guard lock(reader.mutex_);
      reader.in_use_ = false;
      if (reader.close_requested_) reader.reader_.reset();
    }
    StreamReader& reader;
  };

  [[noreturn]] void refuse(const std::string& reason) const {
    throw Error(ErrorCode::kInvalidArgument, "stream '" + address + "': " + reason);
  }

  // Runs without the GIL; adds the stream's name to the reader's exceptions.
  template <typename Step>
  auto outside(Step&& step) const -> decltype(step()) try {
    return without_gil(step);
  } catch (const Error&) {
    throw;
  } catch (const stream::RefusedError&) {
    throw;  // the connection's fault, which read() reports
  } catch (const std::runtime_error& error) {
    refuse(error.what());
  }

  void note_state() {
    closed = reader_->closed();
    ended = reader_->ended();
    offset = reader_->offset();
    process = reader_->session().process;
  }

  void remember_sources() {
    const auto& all = reader_->sources();
    if (all.empty() || (!seen_.empty() && seen_.back().source == all.back())) return;
    for (const auto& source : all)
      if (places_.try_emplace(source.get(), seen_.size()).second)
        seen_.push_back({source, reader_->session().process_index, {}});
  }

  // (source, seq, time_ns, run, device, flags, arrays), with the same dict for all records of a
  // source.
  nb::object tuple_of(const stream::Record& record) {
    remember_sources();
    Seen& seen = seen_[places_.at(record.source.get())];
    if (!seen.dict.is_valid()) seen.dict = source_dict(*seen.source, seen.process_index);
    nb::list arrays;
    for (const stream::Leaf& leaf : record.source->leaves) arrays.append(leaf_array(record, leaf));
    return nb::make_tuple(seen.dict, record.seq, record.time_ns, record.run, record.device,
                          record.flags, arrays);
  }

  OfProcess opened_in_;
  bool is_file_ = false;
  nb::ft_mutex mutex_;  // guards the end of the reader, and
  bool in_use_ = false;
  Shared<bool> close_requested_{false};
  std::unique_ptr<stream::Reader> reader_;
  std::vector<Seen> seen_;
  std::unordered_map<const stream::Source*, std::size_t> places_;  // in seen_
};

nb::list read_outfeed(const std::string& path) {
  Outfeed2020Reader reader(path);
  nb::list messages;
  while (auto message = reader.next()) {
    nb::list arrays;
    const char* data = message->data.data();
    for (const outfeed_2020::ArrayType& array : message->arrays) {
      arrays.append(copy_of(data, array.dims, array.dtype));
      data += array.nbytes();
    }
    messages.append(nb::make_tuple(message->consumer, arrays));
  }
  return messages;
}

nb::bytes outfeed_header(
    std::uint64_t consumer,
    const std::vector<std::pair<std::string, std::vector<std::int64_t>>>& types) {
  std::vector<outfeed_2020::ArrayType> arrays;
  arrays.reserve(types.size());
  for (const auto& [dtype, dims] : types)
    arrays.push_back({dtype_from_name(dtype).value_or(DType::kInvalid), dims});
  return bytes_of(outfeed_2020::encode_header(consumer, outfeed_2020::encode_metadata(arrays)));
}

}  // namespace

void bind_stream(nb::module_& module) {
  nb::class_<StreamSink, Consumer>(module, "StreamSink", "A native consumer that writes a stream.")
      .def_prop_ro("address", &StreamSink::address);
  module.def(
      "stream_sink",
      [](const std::string& destination, std::size_t lag_bytes, std::int32_t process_index) {
        StreamServer::Limits limits;
        limits.lag_bytes = lag_bytes;
        return without_gil(
            [&] { return std::make_shared<StreamSink>(destination, limits, process_index); });
      },
      nb::arg("destination"), nb::kw_only(),
      nb::arg("lag_bytes") = StreamServer::Limits().lag_bytes, nb::arg("process_index") = -1,
      "Writes a stream to a file's path, unix:PATH or tcp://HOST:PORT.");
  module.def(
      "outfeed_2020_sink",
      [](const std::string& path) -> std::shared_ptr<Consumer> {
        return std::make_shared<Outfeed2020Sink>(path);
      },
      nb::arg("path"), "Writes the framing of 2020 to a new file.");
  module.def("read_outfeed_2020", &read_outfeed, nb::arg("path"),
             "The messages of a file in the framing of 2020, as (consumer, arrays).");
  module.def("outfeed_2020_header", &outfeed_header, nb::arg("consumer"), nb::arg("types"),
             "The header, as bytes, of arrays of the types (dtype's name, dims).");
  nb::class_<StreamReader>(module, "StreamReader", "Reads a stream; see callgate.open_stream.")
      .def(nb::init<std::string>(), nb::arg("address"))
      .def("read", &StreamReader::read, nb::arg("timeout") = 0.0, nb::arg("limit") = 1,
           "(source, seq, time_ns, run, device, flags, arrays) of each available record.")
      .def("scan", &StreamReader::scan, "Reads to the end, only for sources().")
      .def("sources", &StreamReader::sources)
      .def("close", &StreamReader::close)
      .def_prop_ro(
          "closed", [](const StreamReader& r) -> bool { return r.closed; },
          "True if the writer closed it.")
      .def_prop_ro(
          "ended", [](const StreamReader& r) -> bool { return r.ended; },
          "True if the last read reached the end.")
      .def_prop_ro(
          "offset", [](const StreamReader& r) -> std::uint64_t { return r.offset; },
          "The position of the next frame.")
      .def_prop_ro(
          "process", [](const StreamReader& r) -> std::uint32_t { return r.process; },
          "The writer's process id.")
      .def_ro("address", &StreamReader::address);
}

}  // namespace callgate::bindings
