// SPDX-License-Identifier: Apache-2.0
// Knobs and requests to stop: the same for all devices at the same read, and by dispatch.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "cells/steer.h"
#include "core/array_view.h"
#include "core/call.h"

namespace callgate {
namespace {

TEST(CommonReads, TheFirstDeviceDecides) {
  CommonReads reads(2);
  std::uint64_t now = 0;
  auto next = [&] { return now++; };
  EXPECT_EQ(reads.read(7, 0, nullptr, next), 0u);
  EXPECT_EQ(reads.read(7, 0, nullptr, next), 1u);
  EXPECT_EQ(reads.read(7, 1, nullptr, next), 0u);
  EXPECT_EQ(reads.read(7, 1, nullptr, next), 1u);
  EXPECT_EQ(reads.read(7, 1, nullptr, next), 2u);
  EXPECT_EQ(reads.read(7, 0, nullptr, next), 2u);
  EXPECT_EQ(now, 3u);
}

TEST(CommonReads, RunsAreApart) {
  CommonReads reads(2);
  std::uint64_t now = 0;
  auto next = [&] { return now++; };
  for (std::int64_t run = 0; run < 20; ++run)
    EXPECT_EQ(reads.read(run, 0, nullptr, next), static_cast<std::uint64_t>(run));
  EXPECT_EQ(reads.read(19, 1, nullptr, next), 19u);
}

TEST(CommonReads, DevicesAgreeWhateverTheirPace) {
  constexpr int kDevices = 4, kReads = 20'000;
  CommonReads reads(kDevices);
  std::atomic<std::uint64_t> now{0};
  std::vector<std::vector<std::uint64_t>> got(kDevices);
  {
    std::vector<std::jthread> threads;
    for (int device = 0; device < kDevices; ++device)
      threads.emplace_back([&, device] {
        for (int i = 0; i < kReads; ++i)
          got[device].push_back(reads.read(1, device, nullptr, [&] { return now.fetch_add(1); }));
      });
  }
  for (int device = 1; device < kDevices; ++device) EXPECT_EQ(got[device], got[0]);
  EXPECT_EQ(now.load(), static_cast<std::uint64_t>(kReads));
}

// The value that a site gives a call of the run.
template <typename T>
T read(Site& site, std::int64_t run = 1, std::int32_t device = 0) {
  T value{};
  ArrayView result{&value, nullptr, 0, sizeof(T) == 1 ? DType::kPred : DType::kS32};
  site.run({{}, {&result, 1}, {.device = device, .run = run}});
  return value;
}

TEST(Knob, IsReadAsItIsSet) {
  auto knob = std::make_shared<KnobCallee>("knob", 5);
  auto site = knob->specialise({});
  EXPECT_EQ(read<std::int32_t>(*site), 5);
  knob->set(static_cast<std::uint32_t>(-3));
  EXPECT_EQ(read<std::int32_t>(*site), -3);
}

TEST(Knob, ForAnExecutionItIsWhatItsFirstReadGot) {
  KnobCallee knob("knob", 1);
  EXPECT_EQ(knob.read(10, true, nullptr), 1u);
  knob.set(2);
  EXPECT_EQ(knob.read(10, true, nullptr), 1u);
  EXPECT_EQ(knob.read(10, false, nullptr), 2u);
  EXPECT_EQ(knob.read(11, true, nullptr), 2u);
}

TEST(Knob, ForAnExecutionItStaysTheSameHoweverManyOthersReadMeanwhile) {
  KnobCallee knob("knob", 1);
  std::uint64_t own = 0, other = 0;
  EXPECT_EQ(knob.read(0, true, &own), 1u) << "run 0 is one as any other";
  for (std::int64_t run = 1; run < 200'000; ++run) {
    knob.set(static_cast<std::uint64_t>(run) + 1);
    ASSERT_EQ(knob.read(run, true, &other), static_cast<std::uint64_t>(run) + 1);
  }
  EXPECT_EQ(knob.read(0, true, &own), 1u);
  EXPECT_EQ(knob.read(-1, true, &own), 200'000u) << "a run without a number";
}

TEST(CommonReads, DevicesAgreeHoweverManyRunsAreBetweenThem) {
  CommonReads reads(2);
  std::uint64_t now = 0, places[4];
  auto next = [&] { return now++; };
  EXPECT_EQ(reads.read(0, 0, &places[0], next), 0u);
  for (std::int64_t run = 1; run < 100'000; ++run)
    for (std::int64_t device : {0, 1}) reads.read(run, device, &places[2 + device], next);
  EXPECT_EQ(reads.read(0, 1, &places[1], next), 0u);
}

TEST(Stop, ALongRunIsToldHoweverManyOthersAreDispatched) {
  auto stop = std::make_shared<StopCallee>("stop");
  std::uint64_t own = 0, other = 0;
  stop->dispatched();
  EXPECT_EQ(stop->read(7, true, &own), 0u);
  for (std::int64_t run = 8; run < 100'000; ++run) {
    stop->dispatched();
    ASSERT_EQ(stop->read(run, true, &other), 0u);
  }
  StopRequests::add();
  EXPECT_EQ(stop->read(7, true, &own), 1u);
}

TEST(Stop, IsForRunsDispatchedBefore) {
  auto stop = std::make_shared<StopCallee>("stop");
  auto site = stop->specialise({});
  for (int i = 0; i < 3; ++i) stop->dispatched();
  EXPECT_EQ(read<std::uint8_t>(*site, 100), 0);
  StopRequests::add();
  stop->dispatched();
  EXPECT_EQ(read<std::uint8_t>(*site, 100), 1);
  EXPECT_EQ(read<std::uint8_t>(*site, 101), 1);  // which had not begun
  EXPECT_EQ(read<std::uint8_t>(*site, 102), 1);
  EXPECT_EQ(read<std::uint8_t>(*site, 103), 0);
  StopRequests::add();
  EXPECT_EQ(read<std::uint8_t>(*site, 103), 1);
}

TEST(Stop, ARunThatNeverAskedIsPassedOver) {
  auto stop = std::make_shared<StopCallee>("stop");
  auto site = stop->specialise({});
  stop->dispatched();
  EXPECT_EQ(read<std::uint8_t>(*site, 0xFFFFFFFF), 0);  // XLA's numbers begin again at 0
  stop->dispatched();
  StopRequests::add();
  stop->dispatched();
  EXPECT_EQ(read<std::uint8_t>(*site, 1), 0);
  EXPECT_EQ(read<std::uint8_t>(*site, 0), 1);
}

TEST(Stop, WhatNobodySawDispatchedCountsFromItsFirstQuestion) {
  auto stop = std::make_shared<StopCallee>("stop");
  auto site = stop->specialise({});
  StopRequests::add();
  EXPECT_EQ(read<std::uint8_t>(*site, 5), 0);
  StopRequests::add();
  EXPECT_EQ(read<std::uint8_t>(*site, 5), 1);
  EXPECT_EQ(read<std::uint8_t>(*site, 6), 0);
}

TEST(Stop, ManyDispatchesAreForgottenInOrder) {
  auto stop = std::make_shared<StopCallee>("stop");
  auto site = stop->specialise({});
  for (std::int64_t run = 0; run < 5000; ++run) {
    stop->dispatched();
    EXPECT_EQ(read<std::uint8_t>(*site, run), 0);
  }
  StopRequests::add();
  EXPECT_EQ(read<std::uint8_t>(*site, 4999), 1);
}

}  // namespace
}  // namespace callgate
