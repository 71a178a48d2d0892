// Disks that are full after any number of bytes: what is whole stays, what is lost is counted, and
// writing goes on when there is room. A limit on the size of files stands for the disk: it fails
// writes part of the way.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "callgate/stream.h"
#include "channel/outfeed_2020_file.h"
#include "channel/sinks/jsonl.h"
#include "channel/sinks/npy.h"
#include "channel/stream_sink.h"
#include "core/error.h"
#include "fake_records.h"

namespace callgate {
namespace {

constexpr std::int8_t kRecords = 20;

void limit_files(rlim_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  setrlimit(RLIMIT_FSIZE, &limit);
}

// One kind of file: how it is written, and the numbers that are in it.
struct Kind {
  std::function<std::unique_ptr<Consumer>(const std::string&)> make;
  std::function<std::vector<int>(const std::string&)> read;
};

std::vector<int> numbers_of_lines(const std::string& path) {
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

std::vector<int> numbers_of_rows(const std::string& path) {
  const std::string text = read_text(path);
  if (text.empty()) return {};
  const NpyHeader header = NpyHeader::parse(text, path);
  std::vector<int> numbers;
  for (std::size_t i = 0; i < header.rows; ++i) numbers.push_back(text.at(header.bytes + 40 * i));
  return numbers;
}

std::vector<int> numbers_of_frames(const std::string& path) {
  std::vector<int> numbers;
  stream::Reader reader(path);
  while (auto record = reader.next()) numbers.push_back(record->payload[0]);
  return reader.closed() ? numbers : std::vector<int>{-1};
}

std::vector<int> numbers_of_messages(const std::string& path) {
  std::vector<int> numbers;
  Outfeed2020Reader reader(path);
  for (auto message = reader.next(); message; message = reader.next()) {
    if (message->end) return numbers;
    numbers.push_back(message->data.at(0));
  }
  return {-1};
}

template <typename Sink, typename... Options>
Kind kind(std::vector<int> (*read)(const std::string&), Options... options) {
  return {[=](const std::string& path) { return std::make_unique<Sink>(path, options...); }, read};
}

// Writes to a file that has room for `room` bytes for a while; "" where all is as it should be.
std::string check(const Kind& kind, const std::string& path, rlim_t room) {
  FakeTap tap("x", DType::kS8, {40});
  auto sink = kind.make(path);
  std::vector<Record> batch;
  for (std::int8_t i = 0; i < kRecords; ++i) batch.push_back(tap.record({Bytes(40, i)}));
  limit_files(room);
  bool threw = false;
  try {
    sink->consume(batch);
  } catch (const Error& error) {
    threw = std::string(error.what()).find(path) != std::string::npos;
  }
  const std::uint64_t lost = sink->lost();
  limit_files(RLIM_INFINITY);
  sink->consume(std::vector{tap.record({Bytes(40, kRecords)})});
  sink->close();
  if (sink->lost() != lost) return "lost more with room again";
  if (threw != (lost != 0)) return "said nothing of what was lost, or not where";
  std::vector<int> expected(kRecords - lost);
  std::iota(expected.begin(), expected.end(), 0);
  expected.push_back(kRecords);
  if (kind.read(path) != expected) return std::to_string(lost) + " lost, by another file";
  return "";
}

// In a child, whose limits and signals these are.
void check_all(const Kind& kind, rlim_t step) {
  TemporaryFolder folder;
  const std::string path = folder.file("file");
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    std::string wrong;
    for (rlim_t room = 0; wrong.empty() && room < 4000; room += step) {
      ::unlink(path.c_str());
      try {
        wrong = check(kind, path, room);
      } catch (const std::exception& error) {
        wrong = error.what();
      }
      if (!wrong.empty()) wrong.insert(0, "room for " + std::to_string(room) + ": ");
    }
    write_text(folder.file("wrong"), wrong);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(read_text(folder.file("wrong")), "");
}

TEST(FullDisks, LinesAreWholeAndCounted) {
  check_all(kind<JsonlSink>(&numbers_of_lines, FileMode::kCreate), 37);
  check_all(kind<JsonlSink>(&numbers_of_lines, FileMode::kAppend), 37);
}

TEST(FullDisks, RowsAreWholeAndCounted) {
  check_all(kind<NpySink>(&numbers_of_rows, FileMode::kCreate), 23);
  check_all(kind<NpySink>(&numbers_of_rows, FileMode::kAppend), 23);
}

TEST(FullDisks, FramesAreWholeAndCounted) { check_all(kind<StreamSink>(&numbers_of_frames), 31); }

TEST(FullDisks, MessagesAreWholeAndCounted) {
  check_all(kind<Outfeed2020Sink>(&numbers_of_messages), 31);
}

}  // namespace
}  // namespace callgate
