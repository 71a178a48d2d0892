// SPDX-License-Identifier: Apache-2.0
// The fake driver alone, by its control interface: it finds faults, and it is right. It stays
// strict here.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <list>
#include <set>
#include <string>
#include <vector>

#include "../fakecuda.h"

namespace {

using Numbers = std::array<float, 6>;
constexpr Numbers kNumbers{0, 1, 2, 3, 4, 5};

// An array in a device's memory.
struct Array {
  std::uint64_t pointer = fakecuda_new_memory(0, sizeof(Numbers));

  explicit Array(const Numbers& values = {}) { set(values); }
  void set(const Numbers& values) const {
    EXPECT_EQ(fakecuda_write(pointer, values.data(), sizeof(values)), 0);
  }
  Numbers get() const {
    Numbers values;
    EXPECT_EQ(fakecuda_read(values.data(), pointer, sizeof(values)), 0);
    return values;
  }
};

class FakeDriver : public testing::Test {
 protected:
  void SetUp() override { fakecuda_clear(); }
  void TearDown() override {
    fakecuda_clear();  // lets go of what is held
    for (void* stream : {first_, second_}) {
      fakecuda_finish(stream);
      fakecuda_delete_stream(stream);
    }
  }

  // Work that copies one array into another, as producers and consumers do.
  void copy(void* stream, const Array& from, const Array& to) {
    copies_.push_back({from.pointer, to.pointer});
    auto work = [](void* data) {
      const Copy& copy = *static_cast<Copy*>(data);
      auto* target = static_cast<float*>(fakecuda_host(copy.to));
      const auto* source = static_cast<const float*>(fakecuda_host(copy.from));
      std::copy_n(source, kNumbers.size(), target);
    };
    EXPECT_EQ(fakecuda_enqueue(stream, work, &copies_.back(), &from.pointer, 1, &to.pointer, 1), 0);
  }
  static std::vector<std::string> violations() {
    std::vector<std::string> found;
    for (std::size_t i = 0; i < fakecuda_violation_count(); ++i) {
      found.emplace_back(fakecuda_violation_at(i));
    }
    return found;
  }
  static bool contains(const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  }

  void* first_ = fakecuda_new_stream(0);
  void* second_ = fakecuda_new_stream(0);

 private:
  struct Copy {
    std::uint64_t from, to;
  };
  std::list<Copy> copies_;  // streams hold their addresses
};

TEST_F(FakeDriver, GivesBackTheMemoryThatWasWritten) {
  EXPECT_EQ(Array(kNumbers).get(), kNumbers);
  Numbers values;
  EXPECT_NE(fakecuda_read(values.data(), 16, sizeof(values)), 0);
}

TEST_F(FakeDriver, CrashesAHostThatReadsADevicePointer) {
  const Array array(kNumbers);
  volatile float* pointer = reinterpret_cast<float*>(array.pointer);
  auto read = [pointer] {
    const rlimit no_core{};
    setrlimit(RLIMIT_CORE, &no_core);
    (void)*pointer;
  };
  EXPECT_EXIT(read(), testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(FakeDriver, RunsNothingOfAHeldStream) {
  const Array a(kNumbers), b;
  fakecuda_hold(first_);
  copy(first_, a, b);
  EXPECT_EQ(fakecuda_queued(first_), 1);
  EXPECT_EQ(b.get(), Numbers{});
  fakecuda_release(first_);
  EXPECT_EQ(fakecuda_finish(first_), 0);
  EXPECT_EQ(b.get(), kNumbers);
}

TEST_F(FakeDriver, FindsWorkOfTwoStreamsWithoutAnEventBetween) {
  const Array a(kNumbers), b, c;
  copy(first_, a, b);
  copy(second_, b, c);
  ASSERT_EQ(violations().size(), 1);
  EXPECT_TRUE(contains(violations()[0], "not ordered after a test's work, which writes it"));
}

TEST_F(FakeDriver, FindsWritesOverWhatAnotherStreamStillReads) {
  const Array a(kNumbers), b, c;
  copy(first_, a, b);
  copy(second_, c, a);
  ASSERT_EQ(violations().size(), 1);
  EXPECT_TRUE(contains(violations()[0], "which reads it"));
}

TEST_F(FakeDriver, TakesWorkThatTheHostWaitedForAsOrdered) {
  const Array a(kNumbers), b, c;
  copy(first_, a, b);
  fakecuda_finish(first_);
  copy(second_, b, c);
  fakecuda_finish(second_);
  EXPECT_EQ(violations(), std::vector<std::string>{});
  EXPECT_EQ(c.get(), kNumbers);
}

TEST_F(FakeDriver, LetsTwoStreamsReadTheSame) {
  const Array a(kNumbers), b, c;
  copy(first_, a, b);
  copy(second_, a, c);
  EXPECT_EQ(violations(), std::vector<std::string>{});
}

TEST_F(FakeDriver, KnowsMoreStreamsThanAFewHundred) {
  std::set<void*> made;
  for (int i = 0; i < 300; ++i) made.insert(fakecuda_new_stream(0));
  std::vector<void*> known(fakecuda_streams(nullptr, 0));
  fakecuda_streams(known.data(), known.size());
  for (void* stream : known) made.erase(stream);
  EXPECT_TRUE(made.empty());
}

TEST_F(FakeDriver, KeepsDroppedMemoryUntilItsWorkHasEnded) {
  const Array a(kNumbers), b;
  fakecuda_hold(first_);
  copy(first_, a, b);
  fakecuda_drop_memory(a.pointer);
  fakecuda_release(first_);
  EXPECT_EQ(fakecuda_finish(first_), 0);
  EXPECT_EQ(b.get(), kNumbers);
  EXPECT_EQ(fakecuda_host(a.pointer), nullptr);
}

TEST_F(FakeDriver, GivesTheErrorOfAStreamThatFailedEverAfter) {
  const Array a(kNumbers), b;
  fakecuda_fail_stream(first_, 700);
  for (int i = 0; i < 2; ++i) copy(first_, a, b);
  EXPECT_EQ(fakecuda_finish(first_), 700);
  EXPECT_EQ(b.get(), Numbers{});
  fakecuda_clear();
  EXPECT_EQ(fakecuda_finish(first_), 0);
}

TEST_F(FakeDriver, RunsAGraphAgain) {
  const Array a(kNumbers), b;
  EXPECT_EQ(fakecuda_begin_capture(first_), 0);
  copy(first_, a, b);
  void* graph = fakecuda_end_capture(first_);
  ASSERT_EQ(fakecuda_graph_size(graph), 1);
  EXPECT_EQ(b.get(), Numbers{});
  for (float factor : {2.0F, 3.0F}) {
    Numbers values = kNumbers;
    for (float& value : values) value *= factor;
    a.set(values);
    EXPECT_EQ(fakecuda_replay(graph, second_), 0);
    EXPECT_EQ(fakecuda_finish(second_), 0);
    EXPECT_EQ(b.get(), values);
  }
  fakecuda_delete_graph(graph);
}

}  // namespace
