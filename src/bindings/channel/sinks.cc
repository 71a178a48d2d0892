// SPDX-License-Identifier: Apache-2.0
// Python calls these functions with the GIL. They open, write and close files without it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "channel/record.h"
#include "channel/sinks/file.h"
#include "channel/sinks/jsonl.h"
#include "channel/sinks/npy.h"
#include "channel/sinks/stats.h"
#include "channel/thinned.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate::bindings {
namespace {

// Reads a Stats sink's statistics, from any thread, as long as the sink or the reader lives.
struct StatsReader {
  std::shared_ptr<StatsSink> sink;
};

FileMode mode_of(bool append) { return append ? FileMode::kAppend : FileMode::kCreate; }

template <typename Sink>
std::shared_ptr<Consumer> file_sink(std::string path, bool append, std::int64_t process) {
  return without_gil(
      [&] { return std::make_shared<Sink>(std::move(path), mode_of(append), process); });
}

std::pair<std::shared_ptr<Consumer>, StatsReader> stats_sink(std::vector<double> edges) {
  auto sink = std::make_shared<StatsSink>(std::move(edges));
  return {sink, StatsReader{sink}};
}

nb::dict to_dict(const Summary& summary) {
  return dict_of("records", summary.records, "count", summary.count, "nan", summary.nan, "inf",
                 summary.inf, "mean", summary.mean, "variance", summary.variance(), "min",
                 summary.min, "max", summary.max, "last", summary.last, "last_shape",
                 summary.last_dims, "edges", summary.histogram.edges, "counts",
                 summary.histogram.counts, "below", summary.histogram.below, "above",
                 summary.histogram.above);
}

// A new file of a Python sink, which only this process writes from now on. A file with another
// writer raises FileExistsError.
template <typename Claimed, typename... Arguments>
Claimed* claim(const Arguments&... arguments) try {
  return without_gil([&] {
    auto file = std::make_unique<Claimed>(arguments...);
    file->claim();
    return file.release();
  });
} catch (const Error& error) {
  if (error.code() != ErrorCode::kAlreadyExists) throw;
  raise(PyExc_FileExistsError, error.what());
}

// Appends whole lines. Returns the number of lines in the file, and the reason if some are missing,
// or "".
std::pair<std::uint64_t, std::string> append_lines(LineFile& file, const std::string& lines) {
  std::uint64_t written = 0;
  try {
    without_gil([&] { file.append(lines, written); });
  } catch (const Error& error) {
    return {written, error.what()};
  }
  return {written, ""};
}

nb::dict read_stats(const StatsReader& reader) {
  // The lock may be held while values are merged.
  std::map<std::string, Summary> summaries = without_gil([&] { return reader.sink->read(); });
  nb::dict out;
  for (const auto& [name, summary] : summaries)
    out[nb::str(name.c_str(), name.size())] = to_dict(summary);
  return out;
}

// `RecordWriter` passes records made by Python to a native consumer, in the form of a channel. For
// sinks that are used without a channel.
//
// A record of one lane is written as a batch in which `where` sends only this lane, because
// consumers know lanes only in this form. A writer is used by one thread at a time, and not while a
// channel feeds its consumer. The consumer runs without the GIL.
//
// One leaf from Python: its path as written by keystr, the code of its dtype, its extents, and its
// bytes in XLA's layout.
using LeafArgument = std::tuple<std::string, int, std::vector<std::int64_t>, nb::bytes>;

// A leaf's part of a whole array: the whole extents, and the leaf's start.
using PartArgument = std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>>;

struct alignas(kRecordAlignment) Block {
  char bytes[kRecordAlignment];
};

void add_leaf(Source& source, std::string path, DType dtype,
              const std::vector<std::int64_t>& dims) {
  source.add(std::move(path),
             {nullptr, dims.data(), static_cast<std::int32_t>(dims.size()), dtype});
}

// Extents of batch levels that contain the lane; few distinct ones, so many lanes share a source.
std::vector<std::int64_t> levels_of(const std::vector<std::int64_t>& lane) {
  std::vector<std::int64_t> levels;
  for (std::int64_t index : lane) {
    if (index < 0) throw Error("a record's lane", "indices from 0", std::to_string(index));
    const auto extent = static_cast<std::uint64_t>(index) + 1;
    levels.push_back(static_cast<std::int64_t>(std::bit_ceil(extent)));
  }
  return levels;
}

class RecordWriter : Immovable {  // consumers identify sources by address
 public:
  explicit RecordWriter(std::shared_ptr<Consumer> consumer) : consumer_(std::move(consumer)) {}

  void write(const std::string& name, int role, const std::vector<LeafArgument>& leaves,
             const std::string& description, std::uint64_t seq, std::int64_t time_ns,
             std::int64_t run, std::int32_t device, bool repeated,
             const std::vector<std::int64_t>& lane, const std::vector<PartArgument>& parts) {
    const std::vector<std::int64_t> levels = levels_of(lane);
    const Source& from = source(name, description, static_cast<Role>(role), leaves, levels, parts);
    std::vector<Block> blocks(from.payload_bytes / sizeof(Block) + 1);
    char* payload = blocks.front().bytes;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const LeafType& leaf = from.leaves[i];
      const nb::bytes& bytes = std::get<3>(leaves[i]);
      if (bytes.size() != leaf.nbytes)
        throw Error("leaf '" + leaf.path + "' of a record", std::to_string(leaf.nbytes) + " bytes",
                    std::to_string(bytes.size()));
      std::memcpy(payload + leaf.offset, bytes.c_str(), bytes.size());
    }
    std::int64_t position = 0;
    for (std::size_t level = 0; level < lane.size(); ++level)
      position = position * levels[level] + lane[level];
    if (from.has_where) payload[from.leaves.back().offset + static_cast<std::size_t>(position)] = 1;
    const std::uint32_t of_shard = parts.empty() ? 0U : 1U << kShardBit;  // the source's only shard
    const std::uint32_t flags = (repeated ? std::uint32_t{kRepeated} : 0U) | of_shard;
    const Record record{&from, seq, time_ns, run, device, flags, payload};
    without_gil([&] { consumer_->consume({&record, 1}); });
  }

  template <void (Consumer::*kStep)()>
  void tell() {
    without_gil([&] { (consumer_.get()->*kStep)(); });
  }

 private:
  const Source& source(const std::string& name, const std::string& description, Role role,
                       const std::vector<LeafArgument>& leaves,
                       const std::vector<std::int64_t>& levels,
                       const std::vector<PartArgument>& parts) {
    auto made = std::make_unique<Source>();
    made->name = name;
    made->description = description;
    made->role = role;
    made->value_leaves = leaves.size();
    for (const auto& [path, code, dims, bytes] : leaves) {
      const auto dtype = dtype_from_code(code);
      if (!dtype) throw Error("a record", "a dtype's code", std::to_string(code));
      add_leaf(*made, path, *dtype, dims);
    }
    for (const auto& [whole, start] : parts) made->parts.push_back({whole, {start}});
    if (!levels.empty()) {
      const std::size_t operands = leaves.size() + 1;
      std::vector<std::int64_t> masks(levels.size() * operands, 0);  // only `where` is batched
      for (std::size_t i = leaves.size(); i < masks.size(); i += operands) masks[i] = 1;
      made->lanes = Lanes(levels, masks);
      made->has_where = true;
      add_leaf(*made, "", DType::kPred, levels);
    }
    const auto [found, is_new] = sources_.insert(std::move(made));
    // Counts down from the top, because the channels' sources count up. Unique, without order.
    static std::atomic<std::uint64_t> next_id{std::numeric_limits<std::uint64_t>::max()};
    if (is_new) (*found)->id = next_id.fetch_sub(1, std::memory_order_relaxed);
    return **found;
  }

  // By everything that a source consists of; the last leaf's extents are the levels.
  struct Less {
    static auto key(const Source& of) {
      return std::tie(of.name, of.description, of.role, of.value_leaves, of.leaves, of.parts);
    }
    bool operator()(const auto& one, const auto& other) const { return key(*one) < key(*other); }
  };

  std::shared_ptr<Consumer> consumer_;
  std::set<std::unique_ptr<Source>, Less> sources_;
};

}  // namespace

void bind_sinks(nb::module_& module) {
  nb::class_<StatsReader>(module, "StatsReader", "The statistics of a Stats sink.")
      .def("read", &read_stats)
      .def("clear", [](const StatsReader& reader) { without_gil([&] { reader.sink->clear(); }); });
  nb::class_<LineFile>(module, "LineFile", "The file of a sink that writes lines.")
      .def(nb::new_([](const std::string& sink, const std::string& path, bool append) {
             return claim<LineFile>(sink, path, mode_of(append), Place::kAlone,
                                    [](std::string_view) { return false; });
           }),
           nb::arg("sink"), nb::arg("path"), nb::arg("append"))
      .def("first_line", [](const LineFile& file) { return bytes_of(file.first_line()); })
      .def("append", &append_lines, nb::arg("lines"))
      .def("close", [](LineFile& file) { without_gil([&] { file.close(); }); });
  nb::class_<File>(
      module, "FileClaim",
      "Locks a file against other sinks, if a library opens it itself or if it will be replaced.")
      .def(nb::new_([](const std::string& who, const std::string& path) {
             return claim<File>(who, path, FileUse{FileMode::kAppend});
           }),
           nb::arg("who"), nb::arg("path"))
      .def("close", [](File& file) { without_gil([&] { file.close(); }); })
      .def("remove", [](File& file) {  // of a file created only for the claim
        without_gil([&] {
          ::unlink(file.path().c_str());
          file.close();
        });
      });
  module.def("jsonl_sink", &file_sink<JsonlSink>, nb::arg("path"), nb::arg("append"),
             nb::arg("process"));
  module.def("npy_sink", &file_sink<NpySink>, nb::arg("path"), nb::arg("append"),
             nb::arg("process"));
  module.def("stats_sink", &stats_sink, nb::arg("edges"));
  module.def(
      "thinned",
      [](std::shared_ptr<Consumer> to, std::uint64_t every, double rate) {
        return std::shared_ptr<Consumer>(std::make_shared<Thinned>(std::move(to), every, rate));
      },
      nb::arg("to"), nb::kw_only(), nb::arg("every"), nb::arg("rate"),
      "A consumer that passes a part of its records on to another.");
  nb::class_<RecordWriter>(module, "RecordWriter",
                           "Passes records made in Python to a native consumer.")
      .def(nb::init<std::shared_ptr<Consumer>>(), nb::arg("consumer"))
      .def("write", &RecordWriter::write, nb::kw_only(), nb::arg("name"), nb::arg("role"),
           nb::arg("leaves"), nb::arg("description") = "", nb::arg("seq"), nb::arg("time_ns"),
           nb::arg("run"), nb::arg("device"), nb::arg("repeated"), nb::arg("lane"),
           nb::arg("parts") = std::vector<PartArgument>())
      .def("open", &RecordWriter::tell<&Consumer::open>)
      .def("flush", &RecordWriter::tell<&Consumer::flush>)
      .def("close", &RecordWriter::tell<&Consumer::close>);
}

}  // namespace callgate::bindings
