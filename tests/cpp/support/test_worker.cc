// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "test_worker.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <thread>

#include "workers/protocol.h"
#include "workers/serve.h"

namespace callgate::fake {
namespace {

constexpr const char* kMark = "CALLGATE_TEST_WORKER";

class TestServed final : public Served {
 public:
  void start(std::string_view text) override {
    if (text == "fail") throw Raised("no start");
    if (text == "exit") _exit(7);
    if (text == "leave")
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));  // it is up by then
        _exit(5);
      }).detach();
  }
  void define(std::uint64_t id, std::uint64_t /*of*/, std::string_view bytes) override {
    if (bytes == "undefined") throw Raised("no definition");
    if (bytes == "endless") std::this_thread::sleep_for(std::chrono::minutes(10));
    ++defined_;
    texts_[id] = bytes;
  }
  void forget(std::uint64_t id) noexcept override {
    if ((id & kObject) != 0)
      ++dropped_;
    else
      texts_.erase(id);
  }
  void check_writes(bool /*on*/) override {}

  void run(std::uint64_t site, const Call& call, std::int64_t lane) override {
    const std::string text = texts_.at(site);
    const std::string word = text.substr(0, text.find(' '));
    const double number = std::strtod(text.c_str() + word.size(), nullptr);
    if (word == "sleep") std::this_thread::sleep_for(std::chrono::duration<double>(number));
    if (word == "meet") meet(text.substr(word.size() + 1));
    if (word == "wait") {
      while (!is_interrupted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      throw Raised("interrupted");
    }
    if (word == "exit") {
      std::fprintf(stderr, "last words\n");
      _exit(static_cast<int>(number));
    }
    if (word == "kill") kill(getpid(), static_cast<int>(number));
    if (word == "raise" && lane >= static_cast<std::int64_t>(number))
      throw Raised(std::string(1 << 17, 'x') + " in lane " + std::to_string(lane));
    double value = 0;
    if (word == "pid") value = getpid();
    if (word == "lane") value = static_cast<double>(lane);
    if (word == "known") value = static_cast<double>(texts_.size());
    if (word == "defined") value = defined_;
    if (word == "dropped") value = dropped_;
    for (const ArrayView& result : call.results)
      for (std::size_t i = 0; i < result.size(); ++i) {
        auto* to = static_cast<double*>(result.data) + i;
        if (word == "keep") continue;
        *to = word == "double" ? 2 * static_cast<const double*>(call.operands[0].data)[i] : value;
      }
  }

 private:
  // Leaves this worker's mark in a folder and waits for another worker's.
  static void meet(const std::filesystem::path& folder) {
    std::ofstream(folder / std::to_string(getpid())).put('.');
    const auto marks = [&] {
      const std::filesystem::directory_iterator first(folder);
      return std::distance(begin(first), end(first));
    };
    const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (marks() < 2) {
      if (std::chrono::steady_clock::now() > last) throw Raised("no other worker came");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::map<std::uint64_t, std::string> texts_;
  int defined_ = 0, dropped_ = 0;
};

// Before main(), where this is a worker: glibc tells the arguments.
__attribute__((constructor)) void run_worker(int count, char** arguments) {
  if (std::getenv(kMark) == nullptr || count < 6) return;
  auto number = [&](int i) { return static_cast<int>(std::strtol(arguments[i], nullptr, 10)); };
  signal(SIGUSR2, SIG_IGN);  // is_interrupted() tells as much
  TestServed served;
  serve({number(1), number(2), number(3), number(4)}, served);
  _exit(0);
}

}  // namespace

std::shared_ptr<Pool> make_pool(std::size_t workers, const std::string& start) {
  PoolOptions options;
  options.command = {"/proc/self/exe"};
  options.environment = {std::string(kMark) + "=1", "ASAN_OPTIONS=detect_leaks=0"};
  options.start = start;
  options.workers = workers;
  return Pool::make(std::move(options));
}

Definition make_definition(const std::string& text) {
  static std::uint64_t next = 1;
  return {next++, 0, text};
}

}  // namespace callgate::fake
