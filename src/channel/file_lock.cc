// See the header.
#include "channel/file_lock.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

namespace callgate {
namespace {

// The bytes that are locked.
constexpr off_t kTurn = off_t{1} << 61, kPlace = kTurn + 1;
// Turns are short; one that does not end is that of a process which has been stopped.
constexpr auto kLongTurn = std::chrono::seconds(10);
constexpr auto kLongPause = std::chrono::microseconds(2000);

enum class Got { kLock, kBusy, kNothing };  // kNothing: no locks on this file system

Got lock_byte(int fd, off_t byte, short type) noexcept {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  int done = 0;
  do {
    done = fcntl(fd, F_OFD_SETLK, &lock);
  } while (done != 0 && errno == EINTR);
  if (done == 0) return Got::kLock;
  return errno == EAGAIN || errno == EACCES ? Got::kBusy : Got::kNothing;
}

// The names in a folder that are numbers.
std::vector<std::string> numbers_in(const std::string& folder) {
  std::vector<std::string> names;
  std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), &closedir);
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open.get()))
    if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') names.emplace_back(entry->d_name);
  return names;
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Whether a process has the file open and locked.
bool has_locked(const std::string& process, const struct stat& file) {
  const std::string files = "/proc/" + process + "/fd/";
  const std::string positions = "/proc/" + process + "/fdinfo/";
  for (const std::string& fd : numbers_in(files)) {
    struct stat open{};
    if (stat(std::string(files).append(fd).c_str(), &open) != 0) continue;
    if (open.st_dev != file.st_dev || open.st_ino != file.st_ino) continue;
    if (contents_of(std::string(positions).append(fd)).find("lock:") != std::string::npos)
      return true;
  }
  return false;
}

// What a process was started as, shortened.
std::string program_of(const std::string& process) {
  std::string words = contents_of("/proc/" + process + "/cmdline");
  std::replace(words.begin(), words.end(), '\0', ' ');
  std::erase_if(words, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  while (words.ends_with(' ')) words.pop_back();
  if (words.size() > 80) words = words.substr(0, 77) + "...";
  return words;
}

}  // namespace

std::string lock_holders(int fd) {
  struct stat file{};
  std::string found;
  if (fstat(fd, &file) == 0) {
    for (const std::string& process : numbers_in("/proc")) {
      if (process == std::to_string(getpid()) || !has_locked(process, file)) continue;
      (found += found.empty() ? "process " : ", process ") += process;
      if (std::string program = program_of(process); !program.empty())
        ((found += " (") += program) += ')';
    }
    if (found.empty() && has_locked(std::to_string(getpid()), file))
      found = "another sink of this process, which is to be closed first";
  }
  return found.empty() ? "another process" : found;
}

bool lock_alone(int fd, const std::string& what) {
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno != EWOULDBLOCK) return false;
  throw Error(ErrorCode::kAlreadyExists,
              what + ": another writer has it open: " + lock_holders(fd));
}

FileLock::FileLock(int fd, std::string what) : fd_(fd), what_(std::move(what)) {}

void FileLock::lock() {
  check_process();
  const auto end = std::chrono::steady_clock::now() + kLongTurn;
  for (std::chrono::microseconds pause(20);; pause = std::min(2 * pause, kLongPause)) {
    if (lock_byte(fd_, kTurn, F_WRLCK) != Got::kBusy) return;
    if (std::chrono::steady_clock::now() > end) {
      throw Error(ErrorCode::kDeadlineExceeded,
                  what_ + ": nothing can be written, since for 10 s it has been locked by " +
                      lock_holders(fd_));
    }
    std::this_thread::sleep_for(pause);
  }
}

void FileLock::unlock() noexcept {
  if (getpid() == process_) lock_byte(fd_, kTurn, F_UNLCK);
}

void FileLock::take_place(Place place) {
  if (has_place_) return;
  if (lock_byte(fd_, kPlace, place == Place::kAlone ? F_WRLCK : F_RDLCK) == Got::kBusy) {
    throw Error(ErrorCode::kAlreadyExists, what_,
                place == Place::kAlone ? "a file that nobody else writes to"
                                       : "a file that others append to, if at all",
                "one that is written by " + lock_holders(fd_));
  }
  has_place_ = true;
}

void FileLock::leave() noexcept {
  if (std::exchange(has_place_, false) && getpid() == process_) lock_byte(fd_, kPlace, F_UNLCK);
}

void FileLock::check_process() const {
  if (getpid() == process_) return;
  throw Error(ErrorCode::kAborted, what_ + ": expected to be used by the process that made it, " +
                                       std::to_string(process_) + ", got a fork of that, " +
                                       std::to_string(getpid()) + "; make a sink of its own there");
}

}  // namespace callgate
