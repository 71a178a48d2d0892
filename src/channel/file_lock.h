// Who writes to a file: locks between the processes that write to one, and who they are.
//
// A sink that writes alone, or several that append whole lines, have a *place* in the file for as
// long as they write; a *turn* is held for moments, by whoever looks at the file or appends to it.
// Both are locks of bytes far behind any content (fcntl's locks of open files,
// https://man7.org/linux/man-pages/man2/fcntl_locking.2.html), which no other use of the file
// touches. Where the file system has no locks, there are none.
//
// A fork's child shares its parent's open files, and with them its locks: a lock is given back by
// the process that took it, and never by another.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <string>

namespace callgate {

enum class Place : short {
  kAlone,   // nobody else writes
  kShared,  // others may append as well
};

class FileLock {
 public:
  // For an open descriptor, which outlives this. `what` is for messages: "the sink JSONL, 'a.txt'".
  FileLock(int fd, std::string what);
  ~FileLock() { leave(); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // A turn, for std::lock_guard. Waits for it; throws Error naming who has it when that takes many
  // seconds.
  void lock();
  void unlock() noexcept;

  // In a turn. Throws Error that names the other process where one has the place.
  void take_place(Place place);
  bool has_place() const noexcept { return has_place_; }

  // Gives everything back. Idempotent.
  void leave() noexcept;

  // Throws Error in a fork's child of the process that made this.
  void check_process() const;

 private:
  int fd_;
  std::string what_;
  pid_t process_ = getpid();
  bool has_place_ = false;
};

// Takes the whole file for one writer, which unlocks it by flock(fd, LOCK_UN). False, with errno,
// where the system has no such locks; throws Error that names the other writer where there is one.
bool lock_alone(int fd, const std::string& what);

// Who has the file locked, for messages: "process 1234 ('train.py')", or "another process" where
// the system does not tell.
std::string lock_holders(int fd);

}  // namespace callgate
