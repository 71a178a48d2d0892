// SPDX-License-Identifier: Apache-2.0
// A reader of hostile bytes: it reads, or throws FormatError; it never reads beyond the bytes, and
// takes no memory for what they only claim. Bounded and seeded; the sanitizers watch it in CI, and
// tests/fuzz/stream.cc looks further.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "callgate/stream.h"
#include "channel/stream_sink.h"
#include "fake_attributes.h"
#include "fuzz/stream_reading.h"
#include "hostile.h"
#include "stream_records.h"

namespace callgate {
namespace {

using fuzz::read_stream;
using fuzz::reseal;
using testing::record_of;

std::string sample() {
  StreamEncoder encoder;
  StreamBatch batch;
  Source many;
  many.id = 1;
  many.name = "many";
  many.lanes = fake::lanes("2:11");
  many.leaves = {testing::leaf("x", DType::kF32, {2, 3}), testing::leaf("", DType::kPred, {2})};
  many.value_leaves = 1;
  many.has_where = true;
  auto first = testing::finished(std::move(many)), second = testing::scalar_source();
  encoder.start(batch);
  std::vector<testing::OwnedRecord> owned;
  for (std::uint64_t i = 0; i < 6; ++i) {
    owned.push_back(record_of(i % 2 == 0 ? *first : *second, i));
    encoder.add(owned.back().record, batch);
  }
  encoder.finish(batch);
  return batch.flat();
}

TEST(StreamFuzz, HostileFieldsBehindRightChecksumsAreRefusedOrRead) {
  const std::string valid = sample();
  ASSERT_EQ(read_stream(valid).records, 6U);
  std::mt19937_64 random(1);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = valid;
    for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      std::uint64_t value = testing::hostile_number(random);
      std::size_t width = std::size_t{1} << (random() % 4);
      std::size_t at = random() % (bytes.size() - width) / width * width;
      std::memcpy(bytes.data() + at, &value, width);
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    if (random() % 8 != 0) reseal(bytes);
    EXPECT_LE(read_stream(bytes).records, 6U);
  }
}

TEST(StreamFuzz, RandomBytesAreNoStream) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2'000; ++round) {
    std::string bytes(random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    EXPECT_EQ(read_stream(bytes).records, 0U);
  }
}

// Sealed, and of the length that it claims; its other bytes never come.
std::string claim(std::uint64_t length) {
  std::string head = sample().substr(0, 24);
  std::memcpy(head.data() + 8, &length, 8);
  std::uint32_t crc = stream::crc32c(head.data(), 20);
  std::memcpy(head.data() + 20, &crc, 4);
  return head + std::string(100, 'x');
}

TEST(StreamFuzz, AClaimedLengthTakesNoMemoryFromFilesOrPipes) {
  testing::TemporaryFolder folder;
  const std::uint64_t length = std::uint64_t{1} << 59;  // more than any machine has
  testing::write_contents(folder / "long.cgs", claim(length));
  stream::Reader file(folder / "long.cgs");
  EXPECT_FALSE(file.next());
  EXPECT_TRUE(file.ended());
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(::write(ends[1], claim(length).data(), 124), 124);
  close(ends[1]);
  stream::Reader piped(ends[0]);
  EXPECT_FALSE(piped.next());
  EXPECT_TRUE(piped.ended());
}

}  // namespace
}  // namespace callgate
