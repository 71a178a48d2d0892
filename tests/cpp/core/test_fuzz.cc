// SPDX-License-Identifier: Apache-2.0
// The fuzzers' targets (tests/fuzz) on all seeds and findings, and on a fixed number of changed
// ones: what `make fuzz` looks for at length, in a second. The sanitizers watch.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/targets.h"
#include "hostile.h"
#include "stream_records.h"

namespace callgate {
namespace {

struct FuzzTarget {
  const char* name;
  void (*run)(std::string_view bytes);
};

#define CALLGATE_ENTRY(name) FuzzTarget{#name, &fuzz::name},
constexpr FuzzTarget kFuzzTargets[] = {CALLGATE_FUZZ_TARGETS(CALLGATE_ENTRY)};
#undef CALLGATE_ENTRY

std::ostream& operator<<(std::ostream& out, const FuzzTarget& target) { return out << target.name; }

std::vector<std::string> seeds_of(const char* name) {
  std::set<std::filesystem::path> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(CALLGATE_FUZZ_SEEDS) / name))
    files.insert(entry.path());
  std::vector<std::string> seeds;
  for (const auto& file : files) seeds.push_back(testing::contents(file.string()));
  return seeds;
}

// In memory of exactly their size, so that the address sanitizer sees a step beyond. An input that
// ends the process stays behind.
void run(const FuzzTarget& target, const std::string& bytes) {
  const std::vector<char> exact(bytes.begin(), bytes.end());
  SCOPED_TRACE(::testing::PrintToString(bytes));
  ASSERT_NO_THROW(target.run({exact.data(), exact.size()}));
}

// One change: a number in binary or in text, a byte, a piece that is cut out or comes twice.
void change(std::string& bytes, std::mt19937_64& random) {
  const std::uint64_t value = testing::hostile_number(random);
  const std::size_t width = std::size_t{1} << (random() % 4);
  const std::size_t at = bytes.empty() ? 0 : random() % bytes.size();
  const std::size_t count = random() % 16;
  switch (random() % 6) {
    case 0:
    case 1:
      if (bytes.size() >= width)
        std::memcpy(bytes.data() + std::min(at / width * width, bytes.size() - width), &value,
                    width);
      break;
    case 2:
      if (!bytes.empty()) bytes[at] = static_cast<char>(random());
      break;
    case 3: bytes.erase(at, count); break;
    case 4: bytes.insert(at, bytes.substr(at, count)); break;
    default: {
      const std::size_t digit = bytes.find_first_of("0123456789", at);
      const std::size_t end = bytes.find_first_not_of("0123456789", digit);
      if (digit != std::string::npos)
        bytes.replace(digit, end - digit, std::to_string(static_cast<std::int64_t>(value)));
    }
  }
}

class Fuzz : public ::testing::TestWithParam<FuzzTarget> {};

TEST_P(Fuzz, KeepsItsPromisesForEverySeedAndFinding) {
  const std::vector<std::string> seeds = seeds_of(GetParam().name);
  ASSERT_FALSE(seeds.empty()) << "tests/fuzz/make_seeds.py makes some";
  for (const std::string& seed : seeds) run(GetParam(), seed);
  run(GetParam(), "");
}

TEST_P(Fuzz, KeepsItsPromisesForChangedSeeds) {
  const std::vector<std::string> seeds = seeds_of(GetParam().name);
  std::mt19937_64 random(1);
  for (int round = 0; round < 1500 && !HasFailure(); ++round) {
    std::string bytes = seeds[random() % seeds.size()];
    for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes) change(bytes, random);
    if (random() % 8 == 0) bytes.resize(random() % (bytes.size() + 1));
    run(GetParam(), bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, Fuzz, ::testing::ValuesIn(kFuzzTargets),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace callgate
