// Python calls these with the GIL; files are opened, written and closed without it.
#include "bindings/channel/sinks.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/channel/consumer.h"
#include "bindings/channel/record_writer.h"
#include "bindings/python/gil.h"
#include "channel/sinks/jsonl.h"
#include "channel/sinks/line_file.h"
#include "channel/sinks/npy.h"
#include "channel/sinks/stats.h"

namespace callgate::bindings {
namespace {

// Reads what a Stats sink has counted, from any thread, for as long as either of them lives.
struct StatsReader {
  std::shared_ptr<StatsSink> sink;
};

FileMode mode_of(bool append) { return append ? FileMode::kAppend : FileMode::kCreate; }

ConsumerHandle jsonl_sink(std::string path, bool append) {
  return without_gil([&] {
    return ConsumerHandle{std::make_shared<JsonlSink>(std::move(path), mode_of(append))};
  });
}

ConsumerHandle npy_sink(std::string path, bool append) {
  return {std::make_shared<NpySink>(std::move(path), mode_of(append))};
}

std::pair<ConsumerHandle, StatsReader> stats_sink(std::vector<double> edges) {
  auto sink = std::make_shared<StatsSink>(std::move(edges));
  return {ConsumerHandle{sink}, StatsReader{sink}};
}

template <typename T>
nb::list to_list(const std::vector<T>& values) {
  nb::list list;
  for (const T& value : values) list.append(value);
  return list;
}

nb::dict to_dict(const Summary& summary) {
  nb::dict out;
  out["records"] = summary.records;
  out["count"] = summary.count;
  out["nan"] = summary.nan;
  out["inf"] = summary.inf;
  out["mean"] = summary.mean;
  out["variance"] = summary.variance();
  out["min"] = summary.min;
  out["max"] = summary.max;
  out["last"] = to_list(summary.last);
  out["last_shape"] = to_list(summary.last_dims);
  out["edges"] = to_list(summary.histogram.edges);
  out["counts"] = to_list(summary.histogram.counts);
  out["below"] = summary.histogram.below;
  out["above"] = summary.histogram.above;
  return out;
}

// Calls claim() without the GIL; a file that another writes is a FileExistsError.
template <typename Claim>
void claiming(Claim&& claim) {
  try {
    without_gil(claim);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    PyErr_SetString(PyExc_FileExistsError, error.what());
    nb::raise_python_error();
  }
}

// The file of a sink of lines in Python. It is claimed at once: such a sink opens it to write.
class Lines {
 public:
  Lines(const std::string& sink, const std::string& path, bool append) {
    claiming([&] {
      file_ = std::make_unique<LineFile>(sink, path, mode_of(append), Place::kAlone,
                                         [](std::string_view) { return false; });
      file_->claim();
    });
  }

  std::string first_line() const { return file_->first_line(); }

  // Appends whole lines; returns how many are in the file, and why not all of them are, or "".
  std::pair<std::uint64_t, std::string> append(const std::string& lines) {
    return without_gil([&] {
      std::pair<std::uint64_t, std::string> result;
      try {
        file_->append(lines, result.first);
      } catch (const Error& error) {
        result.second = error.what();
      }
      return result;
    });
  }

  void close() {
    without_gil([&] { file_->close(); });
  }

 private:
  std::unique_ptr<LineFile> file_;
};

// For sinks over libraries, which open the file themselves.
class FileClaim {
 public:
  FileClaim(const std::string& sink, const std::string& path) {
    claiming([&] {
      file_ = std::make_unique<File>(sink, path, FileMode::kAppend, Place::kAlone,
                                     /*appends=*/false);
      file_->claim();
    });
  }

  void close() {
    without_gil([&] { file_->close(); });
  }
  // Of a file that is there for the claim alone.
  void remove() {
    without_gil([&] {
      ::unlink(file_->path().c_str());
      file_->close();
    });
  }

 private:
  std::unique_ptr<File> file_;
};

nb::dict read_stats(const StatsReader& reader) {
  // The lock may be held while values are merged.
  std::map<std::string, Summary> summaries = without_gil([&] { return reader.sink->read(); });
  nb::dict out;
  for (const auto& [name, summary] : summaries)
    out[nb::str(name.c_str(), name.size())] = to_dict(summary);
  return out;
}

void clear_stats(const StatsReader& reader) {
  without_gil([&] { reader.sink->clear(); });
}

}  // namespace

void bind_sinks(nb::module_& module) {
  nb::class_<StatsReader>(module, "StatsReader", "What a Stats sink has counted.")
      .def("read", &read_stats)
      .def("clear", &clear_stats);
  nb::class_<RecordWriter>(module, "RecordWriter",
                           "Hands records made in Python to a native consumer.")
      .def(nb::init<const ConsumerHandle&>(), nb::arg("consumer"))
      .def("write", &RecordWriter::write, nb::kw_only(), nb::arg("name"), nb::arg("role"),
           nb::arg("leaves"), nb::arg("seq"), nb::arg("time_ns"), nb::arg("run"), nb::arg("device"),
           nb::arg("repeated"), nb::arg("lane"))
      .def("open", &RecordWriter::open)
      .def("flush", &RecordWriter::flush)
      .def("close", &RecordWriter::close);
  nb::class_<Lines>(module, "LineFile", "The file of a sink of lines.")
      .def(nb::init<const std::string&, const std::string&, bool>(), nb::arg("sink"),
           nb::arg("path"), nb::arg("append"))
      .def("first_line",
           [](const Lines& lines) {
             const std::string line = lines.first_line();
             return nb::bytes(line.data(), line.size());
           })
      .def("append", &Lines::append, nb::arg("lines"))
      .def("close", &Lines::close);
  nb::class_<FileClaim>(module, "FileClaim", "Keeps other sinks away from a file.")
      .def(nb::init<const std::string&, const std::string&>(), nb::arg("sink"), nb::arg("path"))
      .def("close", &FileClaim::close)
      .def("remove", &FileClaim::remove);
  module.def("jsonl_sink", &jsonl_sink, nb::arg("path"), nb::arg("append"));
  module.def("npy_sink", &npy_sink, nb::arg("path"), nb::arg("append"));
  module.def("stats_sink", &stats_sink, nb::arg("edges"));
}

}  // namespace callgate::bindings
