// SPDX-License-Identifier: Apache-2.0
// Stream files: what is written is read, whatever happens between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "callgate/stream.h"
#include "channel/stream_sink.h"
#include "core/error.h"
#include "fake_attributes.h"
#include "stream_records.h"

namespace callgate {
namespace {

using testing::contents;
using ::testing::HasSubstr;
using testing::OwnedRecord;
using testing::record_of;
using testing::TemporaryFolder;
using testing::write_contents;

std::shared_ptr<const Source> rich_source() {
  Source source;
  source.id = 41;
  source.name = "gradients";
  source.description = R"({"transforms": ["batch"]})";
  source.role = Role::kCotangent;
  source.lanes = fake::lanes("3:111;2:011");
  source.leaves = {testing::leaf("['b']", DType::kBF16, {3, 5}),
                   testing::leaf("['w']", DType::kC64, {3, 2, 1, 2}),
                   testing::leaf("", DType::kPred, {3, 2})};
  source.value_leaves = 2;
  source.has_where = true;
  return testing::finished(std::move(source));
}

std::vector<std::uint64_t> sequence(stream::Reader& reader) {
  std::vector<std::uint64_t> seqs;
  while (auto record = reader.next()) seqs.push_back(record->seq);
  return seqs;
}

std::vector<std::uint64_t> counts_below(std::uint64_t end) {
  std::vector<std::uint64_t> counts(end);
  for (std::uint64_t i = 0; i < end; ++i) counts[i] = i;
  return counts;
}

void write_scalars(const std::string& path, std::uint64_t begin, std::uint64_t end) {
  StreamSink sink(path);
  auto source = testing::scalar_source();
  for (std::uint64_t i = begin; i < end; ++i) {
    OwnedRecord owned = record_of(*source, i);
    sink.consume({&owned.record, 1});
  }
  sink.close();
}

TEST(Stream, ChecksumsAreThoseOfTheStandard) {
  // RFC 3720, B.4, and the usual check value; both implementations.
  std::string zeros(32, '\0'), ones(32, '\xff');
  EXPECT_EQ(stream::crc32c("123456789", 9), 0xE3069283U);
  EXPECT_EQ(stream::crc32c(zeros.data(), 32), 0x8A9136AAU);
  EXPECT_EQ(stream::crc32c(ones.data(), 32), 0x62A8AB43U);
  const auto* digits = reinterpret_cast<const unsigned char*>("123456789");
  EXPECT_EQ(~stream::crc::crc32c_tables(~0U, digits, 9), 0xE3069283U);
  EXPECT_EQ(stream::crc32c("6789", 4, stream::crc32c("12345", 5)), 0xE3069283U);
}

TEST(Stream, EveryFieldOfARecordAndItsSourceComesBack) {
  TemporaryFolder folder;
  auto source = rich_source();
  OwnedRecord owned = record_of(*source, 9);
  owned.record.flags = kRepeated;
  {
    StreamSink sink(folder / "all.cgs");
    sink.consume({&owned.record, 1});
  }
  stream::Reader reader(folder / "all.cgs");
  auto record = reader.next();
  ASSERT_TRUE(record);
  EXPECT_EQ(record->seq, 9U);
  EXPECT_EQ(record->time_ns, 1009);
  EXPECT_EQ(record->run, 5);
  EXPECT_EQ(record->device, 2);
  EXPECT_EQ(record->flags, 1U);
  const stream::Source& read = *record->source;
  EXPECT_EQ(read.id, 41U);
  EXPECT_EQ(read.name, "gradients");
  EXPECT_EQ(read.description, source->description);
  EXPECT_EQ(read.role, 2);
  EXPECT_TRUE(read.has_where);
  EXPECT_EQ(read.value_leaves, 2U);
  EXPECT_EQ(read.lanes, "3:111;2:011");
  ASSERT_EQ(read.levels.size(), 2U);
  EXPECT_EQ(read.levels[1].size, 2);
  EXPECT_EQ(read.levels[1].mask, "011");
  ASSERT_EQ(read.leaves.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    const LeafType& want = source->leaves[i];
    const stream::Leaf& got = read.leaves[i];
    EXPECT_EQ(got.path, want.path);
    EXPECT_EQ(got.dtype, name(want.dtype));
    EXPECT_EQ(got.code, static_cast<std::uint32_t>(want.dtype));
    EXPECT_EQ(got.dims, want.dims);
    EXPECT_EQ(std::string(record->data(got), got.nbytes),
              std::string(owned.record.data(want), want.nbytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(record->data(got)) % 8, 0U);
  }
  EXPECT_FALSE(reader.next());
  EXPECT_TRUE(reader.closed());
  EXPECT_EQ(reader.session().process, static_cast<std::uint32_t>(getpid()));
  EXPECT_EQ(reader.session().process_index, -1);
}

TEST(Stream, ASessionSaysWhichProcessWroteIt) {
  TemporaryFolder folder;
  std::string path = folder / "run.cgs";
  for (std::int32_t index : {3, 0}) StreamSink(path, {}, index).close();
  stream::Reader reader(path);
  EXPECT_FALSE(reader.next());
  EXPECT_EQ(reader.session().process_index, 0);  // of the session that came last
}

TEST(Stream, ASessionFromBeforeProcessIndicesIsReadAsUnknown) {
  StreamBatch batch;
  StreamEncoder(5).start(batch);
  std::string old = batch.bytes.substr(0, 40);
  std::uint64_t length = old.size();
  std::memcpy(old.data() + 8, &length, sizeof(length));
  std::uint32_t body = stream::crc32c(old.data() + 24, 16);
  std::memcpy(old.data() + 4, &body, sizeof(body));
  std::uint32_t head = stream::crc32c(old.data(), 20);
  std::memcpy(old.data() + 20, &head, sizeof(head));
  for (const auto& [bytes, index] : {std::pair(batch.bytes, 5), std::pair(old, -1)}) {
    stream::Reader reader(bytes.data(), bytes.size());
    EXPECT_FALSE(reader.next());
    EXPECT_EQ(reader.session().process_index, index);
    EXPECT_EQ(reader.offset(), bytes.size());
  }
}

TEST(Stream, LargeLeavesAreWrittenFromWhereTheyLie) {
  TemporaryFolder folder;
  Source large;
  large.id = 3;
  large.leaves = {testing::leaf("a", DType::kS8, {200'001}), testing::leaf("b", DType::kS8, {3}),
                  testing::leaf("c", DType::kF32, {1 << 20}), testing::leaf("d", DType::kF32, {0})};
  auto source = testing::finished(std::move(large));
  std::vector<OwnedRecord> owned{record_of(*source, 0), record_of(*source, 1)};
  std::vector<Record> records{owned[0].record, owned[1].record};
  StreamSink sink(folder / "large.cgs");
  sink.consume(records);
  stream::Reader reader(folder / "large.cgs");
  for (const Record& want : records) {
    auto got = reader.next();
    ASSERT_TRUE(got);
    for (std::size_t i = 0; i < source->leaves.size(); ++i) {
      const stream::Leaf& leaf = got->source->leaves[i];
      ASSERT_EQ(leaf.nbytes, source->leaves[i].nbytes);
      EXPECT_EQ(std::memcmp(got->data(leaf), want.data(source->leaves[i]), leaf.nbytes), 0);
    }
  }
}

TEST(Stream, AFileIsReadWhileItIsWritten) {
  TemporaryFolder folder;
  StreamSink sink(folder / "live.cgs");
  stream::Reader reader(folder / "live.cgs");
  EXPECT_FALSE(reader.next());
  auto source = testing::scalar_source();
  for (std::uint64_t i = 0; i < 50; ++i) {
    OwnedRecord owned = record_of(*source, i);
    sink.consume({&owned.record, 1});
    auto record = reader.next();
    ASSERT_TRUE(record);
    EXPECT_EQ(record->seq, i);
    EXPECT_FALSE(reader.next());
  }
  EXPECT_FALSE(reader.closed());
  sink.close();
  EXPECT_FALSE(reader.next());
  EXPECT_TRUE(reader.closed());
}

TEST(Stream, AFileCutAnywhereGivesItsWholeRecordsAndIsAppendedTo) {
  TemporaryFolder folder;
  write_scalars(folder / "whole.cgs", 0, 4);
  std::string whole = contents(folder / "whole.cgs");
  stream::Reader all(whole.data(), whole.size());
  std::vector<std::size_t> ends;  // of each record
  while (all.next()) ends.push_back(all.offset());
  for (std::size_t cut = 0; cut < whole.size(); ++cut) {
    auto kept = static_cast<std::uint64_t>(
        std::count_if(ends.begin(), ends.end(), [&](std::size_t end) { return end <= cut; }));
    std::string path = folder / "cut.cgs";
    write_contents(path, whole.substr(0, cut));
    stream::Reader reader(path);
    EXPECT_EQ(sequence(reader), counts_below(kept)) << cut;
    EXPECT_FALSE(reader.closed());
    write_scalars(path, kept, 6);  // while the reader stands in the torn frame
    auto rest = sequence(reader);
    EXPECT_EQ(rest.size(), 6 - kept) << cut;
    EXPECT_TRUE(reader.closed());
    stream::Reader again(path);
    EXPECT_EQ(sequence(again), counts_below(6)) << cut;
  }
}

TEST(Stream, EveryDamagedByteIsFoundAndItsPlaceSaid) {
  TemporaryFolder folder;
  write_scalars(folder / "whole.cgs", 0, 3);
  std::string whole = contents(folder / "whole.cgs");
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    stream::Reader reader(damaged.data(), damaged.size());
    try {
      sequence(reader);
      ADD_FAILURE() << "not found: byte " << at;
    } catch (const stream::FormatError& error) {
      EXPECT_LE(error.offset(), at);
      EXPECT_EQ(error.offset(), reader.offset());
      EXPECT_THAT(error.what(), HasSubstr("at byte " + std::to_string(error.offset())));
      EXPECT_THROW(reader.next(), stream::FormatError);
    }
  }
}

TEST(Stream, WhatIsNoStreamOrDamagedIsNotAppendedTo) {
  TemporaryFolder folder;
  for (const std::string text : {"x", "a diary that is longer than any header of a frame"}) {
    write_contents(folder / "diary.txt", text);
    EXPECT_THROW(StreamSink(folder / "diary.txt"), Error);
    EXPECT_EQ(contents(folder / "diary.txt"), text);
  }
  write_scalars(folder / "damaged.cgs", 0, 3);
  std::string damaged = contents(folder / "damaged.cgs");
  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 1);
  write_contents(folder / "damaged.cgs", damaged);
  try {
    StreamSink sink(folder / "damaged.cgs");
    FAIL() << "appended to a damaged file";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("damaged.cgs"));
    EXPECT_THAT(error.what(), HasSubstr("at byte"));
  }
  EXPECT_EQ(contents(folder / "damaged.cgs"), damaged);
}

TEST(Stream, AFileHasOneWriterAtATime) {
  TemporaryFolder folder;
  StreamSink sink(folder / "one.cgs");
  try {
    StreamSink other(folder / "one.cgs");
    FAIL() << "two writers";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("another writer"));
  }
}

TEST(Stream, BadDestinationsAreNamed) {
  TemporaryFolder folder;
  for (const std::string& bad : {folder / "no/such/folder.cgs", folder / ".", std::string()}) {
    try {
      StreamSink sink(bad);
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(bad));
    }
  }
}

// Runs `body` in a child; its exit status, or minus the signal that ended it.
template <typename Body>
int in_child(Body&& body) {
  pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Stream, AKilledWriterLosesNothingThatWasConsumed) {
  TemporaryFolder folder;
  std::string path = folder / "killed.cgs";
  int status = in_child([&] {
    StreamSink sink(path);
    auto source = testing::scalar_source();
    for (std::uint64_t i = 0; i < 1000; ++i) {
      OwnedRecord owned = record_of(*source, i);
      sink.consume({&owned.record, 1});
    }
    return raise(SIGKILL);
  });
  EXPECT_EQ(status, -SIGKILL);
  stream::Reader reader(path);
  EXPECT_EQ(sequence(reader), counts_below(1000));
  EXPECT_FALSE(reader.closed());
  write_scalars(path, 1000, 1003);
  EXPECT_EQ(sequence(reader), (std::vector<std::uint64_t>{1000, 1001, 1002}));
}

TEST(Stream, ASourceThatNoReaderWouldTakeDoesNotTakeOthersAlong) {
  TemporaryFolder folder;
  Source fields;
  fields.id = 3;
  fields.name = "crowd";
  fields.lanes = fake::lanes("4294967296:1");
  fields.leaves = {testing::leaf("", DType::kF32, {std::int64_t{1} << 32, 0})};
  auto crowd = testing::finished(std::move(fields)), good = testing::scalar_source();
  auto first = record_of(*crowd, 0), second = record_of(*good, 1);
  StreamSink sink(folder / "s.cgs");
  for (std::uint64_t round = 1; round <= 2; ++round) {
    std::vector<Record> records{first.record, second.record, first.record, second.record};
    try {
      sink.consume(records);
      FAIL() << "2^32 lanes were written";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("crowd"));
    }
    EXPECT_EQ(sink.lost(), 2 * round);
  }
  sink.close();
  stream::Reader reader(folder / "s.cgs");
  for (int i = 0; i < 4; ++i) {
    auto record = reader.next();
    ASSERT_TRUE(record);
    EXPECT_EQ(record->source->name, good->name);
  }
  EXPECT_FALSE(reader.next());
  EXPECT_TRUE(reader.closed());
}

TEST(Stream, AFullDiskIsAnErrorAndTheFileStaysWhole) {
  TemporaryFolder folder;
  std::string path = folder / "full.cgs";
  // A limit on the size of files stands for the disk; it fails writes part of the way.
  int status = in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    StreamSink sink(path);
    auto source = testing::scalar_source();
    OwnedRecord owned = record_of(*source, 0);
    sink.consume({&owned.record, 1});
    rlimit limit{};
    getrlimit(RLIMIT_FSIZE, &limit);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = static_cast<rlim_t>(contents(path).size() + 100);
    setrlimit(RLIMIT_FSIZE, &limit);
    std::vector<Record> many(10, owned.record);
    bool threw = false;
    try {
      sink.consume(many);
    } catch (const Error& error) {
      threw = std::string(error.what()).find("full.cgs") != std::string::npos;
    }
    limit.rlim_cur = before;
    setrlimit(RLIMIT_FSIZE, &limit);
    OwnedRecord later = record_of(*source, 1);
    sink.consume({&later.record, 1});  // there is room again
    if (sink.lost() != 9) return 2;    // there was room for one
    return threw ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  stream::Reader reader(path);
  EXPECT_EQ(sequence(reader), (std::vector<std::uint64_t>{0, 0, 1}));
}

// The tail after a power loss: a file of the right length whose last blocks were never written.
TEST(Stream, AZeroFilledTailIsATornEndWhereverItBegins) {
  TemporaryFolder folder;
  const std::string path = folder / "tail.cgs";
  write_scalars(path, 0, 40);
  const std::string whole = contents(path);
  std::vector<std::uint64_t> ends;  // of the frames
  {
    stream::Reader reader(whole.data(), whole.size());
    while (reader.next()) ends.push_back(reader.offset());
  }
  for (std::size_t cut = 0; cut <= whole.size(); cut += 7) {
    for (std::size_t zeros : {std::size_t{512}, std::size_t{8192}}) {
      std::string torn = whole.substr(0, cut) + std::string(zeros, '\0');
      write_contents(path, torn);
      stream::Reader memory(torn.data(), torn.size());
      const std::size_t left = sequence(memory).size();
      const auto expected = static_cast<std::size_t>(
          std::count_if(ends.begin(), ends.end(), [&](std::uint64_t end) { return end <= cut; }));
      // Zeros may be what was there: padding, and the upper bytes of small numbers.
      ASSERT_GE(left, expected) << "cut at " << cut;
      ASSERT_LE(left, expected + 1) << "cut at " << cut;
      stream::Reader reader(path);
      ASSERT_EQ(sequence(reader), counts_below(left));
      ASSERT_TRUE(reader.ended());
      if (cut % 5 != 0) continue;
      write_scalars(path, left, left + 2);  // the next writer cuts it off
      stream::Reader again(path);
      ASSERT_EQ(sequence(again), counts_below(left + 2));
      ASSERT_TRUE(again.closed());
    }
  }
}

TEST(Stream, ZerosWithinAFileAreDamage) {
  TemporaryFolder folder;
  const std::string path = folder / "hole.cgs";
  write_scalars(path, 0, 200);
  std::string holed = contents(path);
  holed.replace(2048, 4096, std::string(4096, '\0'));
  write_contents(path, holed);
  stream::Reader reader(path);
  EXPECT_THROW(sequence(reader), stream::FormatError);
  EXPECT_THROW(StreamSink sink(path), Error);
  EXPECT_EQ(contents(path), holed);
}

}  // namespace
}  // namespace callgate
