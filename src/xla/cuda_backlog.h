// A bound on what waits for its way to the host.
//
// Programs are given to a stream long before it runs them, so the copies of their taps could take
// any amount of pinned memory. Beyond kMost the program's thread waits.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace callgate::xla_ffi {

class Backlog {
 public:
  static constexpr std::size_t kMost = std::size_t{512} << 20;

  // A share of the bound; a call that is larger than all of it waits until it is alone.
  class Room {
   public:
    explicit Room(std::size_t bytes) : bytes_(bytes) {
      Backlog& all = instance();
      std::unique_lock lock(all.mutex_);
      all.freed_.wait(lock, [&] { return all.taken_ == 0 || all.taken_ + bytes_ <= kMost; });
      all.taken_ += bytes_;
    }
    ~Room() {
      Backlog& all = instance();
      std::lock_guard lock(all.mutex_);
      all.taken_ -= bytes_;
      all.freed_.notify_all();
    }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

   private:
    std::size_t bytes_;
  };

 private:
  static Backlog& instance() {
    static auto* all = new Backlog();  // never destroyed: completion threads may outlast all else
    return *all;
  }

  std::mutex mutex_;
  std::condition_variable freed_;
  std::size_t taken_ = 0;
};

}  // namespace callgate::xla_ffi
