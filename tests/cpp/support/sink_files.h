// SPDX-License-Identifier: Apache-2.0
// Every native sink that writes a file, and how its file is read: for tests of faults. The records
// are of one array of bytes (FakeTap, int8[40]), each full of a number of its own.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "callgate/stream.h"
#include "channel/consumer.h"
#include "channel/outfeed_2020.h"
#include "channel/sinks/jsonl.h"
#include "channel/sinks/npy.h"
#include "channel/stream_sink.h"
#include "fake_records.h"

namespace callgate::fake {

// One kind of file: how it is written, and the numbers that are in it, {-1} where it is damaged.
struct SinkFile {
  std::string name;
  std::function<std::unique_ptr<Consumer>(const std::string&)> make;
  std::function<std::vector<int>(const std::string&)> read;
};

inline std::ostream& operator<<(std::ostream& out, const SinkFile& file) {
  return out << file.name;
}

inline std::vector<int> numbers_of_lines(const std::string& path) {
  std::vector<int> numbers;
  const std::string text = read_text(path);
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t end = text.find("}\n", start), value = text.find("\"value\":[", start);
    if (end == std::string::npos || value > end) return {-1};
    numbers.push_back(std::stoi(text.substr(value + 9)));
    start = end + 2;
  }
  return numbers;
}

inline std::vector<int> numbers_of_rows(const std::string& path) {
  const std::string text = read_text(path);
  if (text.empty()) return {};
  const NpyHeader header = NpyHeader::parse(text, path);
  std::vector<int> numbers;
  for (std::size_t i = 0; i < header.rows; ++i) numbers.push_back(text.at(header.bytes + 40 * i));
  return numbers;
}

inline std::vector<int> numbers_of_frames(const std::string& path) {
  std::vector<int> numbers;
  stream::Reader reader(path);
  while (auto record = reader.next()) numbers.push_back(record->payload[0]);
  return reader.closed() ? numbers : std::vector<int>{-1};
}

inline std::vector<int> numbers_of_messages(const std::string& path) {
  std::vector<int> numbers;
  Outfeed2020Reader reader(path);
  for (auto message = reader.next(); message; message = reader.next()) {
    if (message->end) return numbers;
    numbers.push_back(message->data.at(0));
  }
  return {-1};
}

template <typename Sink, typename... Options>
SinkFile sink_file(std::string name, std::vector<int> (*read)(const std::string&),
                   Options... options) {
  return {
      std::move(name),
      [=](const std::string& path) { return std::make_unique<Sink>(path, options...); },
      read,
  };
}

inline std::vector<SinkFile> sink_files() {
  return {
      sink_file<JsonlSink>("Jsonl", &numbers_of_lines, FileMode::kCreate),
      sink_file<JsonlSink>("JsonlThatAppends", &numbers_of_lines, FileMode::kAppend),
      sink_file<NpySink>("Npy", &numbers_of_rows, FileMode::kCreate),
      sink_file<NpySink>("NpyThatAppends", &numbers_of_rows, FileMode::kAppend),
      sink_file<StreamSink>("Stream", &numbers_of_frames),
      sink_file<Outfeed2020Sink>("Outfeed2020", &numbers_of_messages),
  };
}

}  // namespace callgate::fake
