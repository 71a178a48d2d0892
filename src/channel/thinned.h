// SPDX-License-Identifier: Apache-2.0
// A consumer that passes on a part of its records: every n-th of each tap on each device, and at
// most a given number per second. The lanes of a vmap are one record. Both run on the channel's
// thread, without Python.
//
// Records carry the wall clock's time, which may be changed by the user; a rate needs the steady
// clock. A record's steady time is its wall time minus the wall clock's lead. The lead is stored,
// because two readings differ by microseconds, in which many records may come.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/record.h"

namespace callgate {

// Both clocks at one time.
struct ClockTimes {
  std::int64_t wall_ns = 0, steady_ns = 0;

  static ClockTimes now() noexcept;

 private:
  static std::int64_t steady_time_ns() noexcept {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

class Thinned final : public Consumer {
 public:
  // `every`: 1 or more. `rate`: records per second; 0 for no limit. `clocks` is for tests.
  Thinned(std::shared_ptr<Consumer> to, std::uint64_t every, double rate,
          std::function<ClockTimes()> clocks = &ClockTimes::now)
      : to_(std::move(to)), every_(every), rate_(rate), clocks_(std::move(clocks)) {}

  void open() override { to_->open(); }

  void consume(std::span<const Record> records) override;

  void flush() override { to_->flush(); }
  void close() override { to_->close(); }
  bool takes_device_arrays() const noexcept override { return to_->takes_device_arrays(); }
  std::string description() const override { return to_->description(); }

 private:
  // The records of one tap on one device.
  struct Count {
    std::uint64_t came = 0;
    bool some = false;  // true after the first one passed
    std::int64_t last_ns = 0;
  };

  void read_clocks();

  bool passes(const Record& record);

  // Each program has its own sources; a tap is identified by its name.
  Count& count_of(const Record& record);

  const std::shared_ptr<Consumer> to_;
  const std::uint64_t every_;
  const double rate_;
  const std::function<ClockTimes()> clocks_;
  std::int64_t lead_ = 0;  // of the wall clock over the steady clock
  std::int64_t wall_now_ = 0;
  std::vector<Record> chosen_;
  std::map<std::tuple<std::string, Role, std::int32_t>, Count> counts_;
  std::map<std::pair<std::uint64_t, std::int32_t>, Count*> known_;
};

}  // namespace callgate
