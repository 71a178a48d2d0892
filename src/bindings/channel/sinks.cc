// Python calls these with the GIL; files are opened, written and closed without it.
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

#include "bindings/channel/channel.h"
#include "bindings/python/gil.h"
#include "channel/sinks/file.h"
#include "channel/sinks/jsonl.h"
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

// A new file of a sink in Python, which this process alone writes from now on. One that another
// writes is a FileExistsError.
template <typename Claimed, typename... Arguments>
Claimed* claim(const Arguments&... arguments) {
  try {
    return without_gil([&] {
      auto file = std::make_unique<Claimed>(arguments...);
      file->claim();
      return file.release();
    });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    PyErr_SetString(PyExc_FileExistsError, error.what());
    nb::raise_python_error();
  }
}

// Appends whole lines; returns how many are in the file, and why not all of them are, or "".
std::pair<std::uint64_t, std::string> append_lines(LineFile& file, const std::string& lines) {
  return without_gil([&] {
    std::pair<std::uint64_t, std::string> result;
    try {
      file.append(lines, result.first);
    } catch (const Error& error) {
      result.second = error.what();
    }
    return result;
  });
}

template <typename Claimed>
void close_file(Claimed& file) {
  without_gil([&] { file.close(); });
}

nb::dict read_stats(const StatsReader& reader) {
  // The lock may be held while values are merged.
  std::map<std::string, Summary> summaries = without_gil([&] { return reader.sink->read(); });
  nb::dict out;
  for (const auto& [name, summary] : summaries)
    out[nb::str(name.c_str(), name.size())] = to_dict(summary);
  return out;
}

}  // namespace

void bind_sinks(nb::module_& module) {
  nb::class_<StatsReader>(module, "StatsReader", "What a Stats sink has counted.")
      .def("read", &read_stats)
      .def("clear", [](const StatsReader& reader) { without_gil([&] { reader.sink->clear(); }); });
  nb::class_<LineFile>(module, "LineFile", "The file of a sink of lines.")
      .def(nb::new_([](const std::string& sink, const std::string& path, bool append) {
             return claim<LineFile>(sink, path, mode_of(append), Place::kAlone,
                                    [](std::string_view) { return false; });
           }),
           nb::arg("sink"), nb::arg("path"), nb::arg("append"))
      .def("first_line",
           [](const LineFile& file) {
             const std::string line = file.first_line();
             return nb::bytes(line.data(), line.size());
           })
      .def("append", &append_lines, nb::arg("lines"))
      .def("close", &close_file<LineFile>);
  nb::class_<File>(module, "FileClaim",
                   "Keeps other sinks away from a file that a library opens by itself.")
      .def(nb::new_([](const std::string& sink, const std::string& path) {
             return claim<File>(sink, path, FileMode::kAppend, Place::kAlone, /*appends=*/false);
           }),
           nb::arg("sink"), nb::arg("path"))
      .def("close", &close_file<File>)
      .def("remove", [](File& file) {  // of a file that is there for the claim alone
        without_gil([&] {
          ::unlink(file.path().c_str());
          file.close();
        });
      });
  module.def("jsonl_sink", &jsonl_sink, nb::arg("path"), nb::arg("append"));
  module.def("npy_sink", &npy_sink, nb::arg("path"), nb::arg("append"));
  module.def("stats_sink", &stats_sink, nb::arg("edges"));
}

}  // namespace callgate::bindings
