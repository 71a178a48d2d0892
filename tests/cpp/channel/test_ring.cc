// SPDX-License-Identifier: Apache-2.0
// The ring alone: entries of any size come out as they went in, in order, whatever wraps; one
// thread drives it at random beside a model, then many threads fill it at once.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "channel/store.h"
#include "channel_fixtures.h"

namespace callgate {
namespace {

// The test's knowledge of an entry that is in the ring.
struct Known {
  std::uint64_t id;
  std::size_t bytes;
};

void write(Entry& entry, const Known& known) {
  entry.record.seq = known.id;
  fake::fill(known.id, entry.inline_payload(), known.bytes);
}

// The next entry that is no filler, and the position after it; null when none is published.
Entry* next_entry(Ring& ring, std::uint64_t& position) {
  for (;;) {
    Entry* entry = ring.at(position);
    if (entry == nullptr) return nullptr;
    position = Ring::after(*entry);
    if (entry->kind != Entry::Kind::kFiller) return entry;
  }
}

void expect_is(Entry& entry, const Known& known) {
  ASSERT_EQ(entry.record.seq, known.id);
  ASSERT_GE(entry.granules * kRecordAlignment, sizeof(Entry) + known.bytes);
  ASSERT_TRUE(known.bytes == 0 || fake::intact(entry.inline_payload(), known.bytes));
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(entry.inline_payload()) % kRecordAlignment, 0U);
}

TEST(Ring, CapacityIsRoundedDownToAPowerOfTwo) {
  EXPECT_EQ(Ring(1).capacity(), 1024U);
  EXPECT_EQ(Ring(1024).capacity(), 1024U);
  EXPECT_EQ(Ring(100'000).capacity(), 65536U);
}

TEST(Ring, CapacityThatCannotBeHadIsAnErrorThatNamesIt) {
  try {
    Ring ring(std::size_t{1} << 62);
    FAIL() << "no machine has so much";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("4611686018427387904 bytes"), std::string::npos);
  }
}

TEST(Ring, AnEntryIsSeenOnceItIsPublishedAndNotBefore) {
  Ring ring(1024);
  EXPECT_EQ(ring.at(0), nullptr);
  Entry* first = ring.reserve(8);
  Entry* second = ring.reserve(8);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  ring.publish(*second);
  EXPECT_EQ(ring.at(0), nullptr) << "a later entry does not show an earlier one";
  ring.publish(*first);
  EXPECT_EQ(ring.at(0), first);
  EXPECT_EQ(ring.at(Ring::after(*first)), second);
  EXPECT_EQ(ring.at(Ring::after(*second)), nullptr);
}

TEST(Ring, AFullRingRefusesAndGoesOnAfterRelease) {
  Ring ring(1024);
  std::vector<Entry*> entries;
  while (Entry* entry = ring.reserve(64)) {
    ring.publish(*entry);
    entries.push_back(entry);
  }
  EXPECT_EQ(entries.size(), 8U) << "each takes 128 bytes";
  EXPECT_EQ(ring.used(), ring.capacity());
  EXPECT_EQ(ring.reserve(0), nullptr);
  ring.release(Ring::after(*entries[0]));
  EXPECT_EQ(ring.used(), ring.capacity() - 128);
  EXPECT_EQ(ring.reserve(64), entries[0]) << "the memory that was freed";
  EXPECT_EQ(ring.reserve(0), nullptr);
}

TEST(Ring, TheLargestEntryFitsIntoAnEmptyRingAtEveryPosition) {
  Ring ring(4096);
  std::uint64_t position = 0;
  for (std::size_t offset = 0; offset < ring.capacity() / kRecordAlignment; ++offset) {
    Entry* small = ring.reserve(0);  // moves the start by a granule each round
    ASSERT_NE(small, nullptr);
    write(*small, {offset, 0});
    ring.publish(*small);
    ASSERT_EQ(next_entry(ring, position), small);
    ring.release(position);
    Entry* entry = ring.reserve(ring.max_payload());
    ASSERT_NE(entry, nullptr) << "at offset " << offset;
    write(*entry, {offset, ring.max_payload()});
    ring.publish(*entry);
    Entry* seen = next_entry(ring, position);
    ASSERT_EQ(seen, entry);
    expect_is(*seen, {offset, ring.max_payload()});
    ring.release(position);
    EXPECT_EQ(ring.used(), 0U);
  }
}

TEST(Ring, PayloadThatLooksLikeMarksIsNotTakenForAnEntry) {
  Ring ring(1024);
  std::uint64_t position = 0;
  for (std::uint32_t lap = 0; lap < 64; ++lap) {
    Entry* entry = ring.reserve(448);
    ASSERT_NE(entry, nullptr);
    std::vector<std::uint32_t> marks(112, lap / 2 + 2);  // of this lap and of the next
    std::memcpy(entry->inline_payload(), marks.data(), 448);
    ring.publish(*entry);
    ASSERT_EQ(next_entry(ring, position), entry);
    for (std::uint64_t inner = entry->position + 64; inner < position; inner += 64) {
      EXPECT_EQ(ring.at(inner), nullptr);
    }
    EXPECT_EQ(next_entry(ring, position), nullptr) << "nothing follows";
    ring.release(position);
  }
}

// A model of the ring is a queue. Reserve, publish in any order, read and release at random.
class RingModel {
 public:
  RingModel(std::size_t capacity, unsigned seed) : ring_(capacity), random_(seed) {}

  void step() {
    switch (random_() % 4) {
      case 0:
      case 1: reserve(); break;
      case 2: publish(); break;
      default: read();
    }
    ASSERT_LE(ring_.used(), ring_.capacity());
  }
  void drain() {
    while (!open_.empty()) publish();
    while (!waiting_.empty() && !::testing::Test::HasFatalFailure()) {
      std::size_t before = waiting_.size();
      read();
      ASSERT_LT(waiting_.size(), before);
    }
    ring_.release(position_);
    EXPECT_EQ(ring_.used(), 0U);
    EXPECT_GT(ring_.tail(), 20 * ring_.capacity()) << "it should have gone round often";
  }

 private:
  void reserve() {
    std::size_t most = random_() % 3 == 0 ? ring_.max_payload() : 200;
    Known known{next_id_, random_() % (most / 8 + 1) * 8};
    Entry* entry = ring_.reserve(known.bytes);
    if (entry == nullptr) {
      ASSERT_GT(ring_.used(), 0U) << "an empty ring takes everything";
      return;
    }
    write(*entry, known);
    waiting_.push_back(known);
    open_.emplace(next_id_++, entry);
  }
  void publish() {
    if (open_.empty()) return;
    auto one = std::next(open_.begin(), static_cast<std::ptrdiff_t>(random_() % open_.size()));
    ring_.publish(*one->second);
    open_.erase(one);
  }
  void read() {
    while (Entry* entry = next_entry(ring_, position_)) {
      ASSERT_FALSE(waiting_.empty());
      ASSERT_FALSE(open_.contains(waiting_.front().id)) << "it is not published";
      expect_is(*entry, waiting_.front());
      waiting_.pop_front();
      if (random_() % 4 == 0) break;
    }
    if (random_() % 2 == 0) ring_.release(position_);
  }

  Ring ring_;
  std::mt19937 random_;
  std::deque<Known> waiting_;             // in the order of their reservation
  std::map<std::uint64_t, Entry*> open_;  // reserved, not yet published
  std::uint64_t next_id_ = 0, position_ = 0;
};

TEST(Ring, EntriesOfAnySizeComeOutAsTheyWentInAndInOrder) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    RingModel model(std::size_t{1024} << (seed % 4), seed);
    for (int i = 0; i < 6000; ++i) {
      model.step();
      if (HasFatalFailure()) FAIL() << "seed " << seed << ", step " << i;
    }
    model.drain();
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

TEST(Ring, ManyProducersLoseNothingAndEachKeepsItsOrder) {
  constexpr std::uint64_t kProducers = 4, kEach = 8000;
  Ring ring(8192);
  std::vector<std::jthread> producers;
  for (std::uint64_t producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&ring, producer] {
      std::mt19937 random(static_cast<unsigned>(producer));
      for (std::uint64_t i = 0; i < kEach;) {
        Known known{producer << 32 | i, random() % 50 * 8 + 8};
        Entry* entry = ring.reserve(known.bytes);
        if (entry == nullptr) {
          std::this_thread::yield();
          continue;
        }
        entry->record.run = static_cast<std::int64_t>(known.bytes);
        write(*entry, known);
        ring.publish(*entry);
        ++i;
      }
    });
  }
  std::vector<std::uint64_t> seen(kProducers, 0);
  std::uint64_t position = 0, intact = 0;
  for (std::uint64_t count = 0; count < kProducers * kEach;) {
    Entry* entry = next_entry(ring, position);
    if (entry == nullptr) {
      std::this_thread::yield();
    } else {
      std::uint64_t producer = entry->record.seq >> 32;
      ASSERT_LT(producer, kProducers);
      ASSERT_EQ(entry->record.seq & 0xffffffff, seen[producer]++);
      auto bytes = static_cast<std::size_t>(entry->record.run);
      intact += fake::intact(entry->inline_payload(), bytes) ? 1 : 0;
      ++count;
    }
    ASSERT_LE(ring.used(), ring.capacity());
    ring.release(position);
  }
  EXPECT_EQ(intact, kProducers * kEach);
  EXPECT_EQ(ring.used(), 0U);
}

}  // namespace
}  // namespace callgate
