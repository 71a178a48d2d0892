// How a file is opened and locked, and who else has it. System calls that a signal interrupts are
// repeated.
#include "channel/sinks/file.h"

#include <dirent.h>
#include <fcntl.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"

namespace callgate {
namespace {

// The bytes that are locked.
constexpr off_t kTurn = off_t{1} << 61, kPlace = kTurn + 1;
// Turns are short; one that does not end is that of a process which has been stopped.
constexpr auto kLongTurn = std::chrono::seconds(10);
constexpr auto kLongPause = std::chrono::microseconds(2000);

// False where another has a lock in the way; true where the file system has no locks.
bool lock_byte(int fd, off_t byte, short type) noexcept {
  struct flock lock{.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1, .l_pid = 0};
  int done = 0;
  do {
    done = fcntl(fd, F_OFD_SETLK, &lock);
  } while (done != 0 && errno == EINTR);
  return done == 0 || (errno != EAGAIN && errno != EACCES);
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
  const std::string folder = "/proc/" + process + "/fd";
  return std::ranges::any_of(numbers_in(folder), [&](const std::string& fd) {
    struct stat open{};
    return stat((folder + '/' + fd).c_str(), &open) == 0 && open.st_dev == file.st_dev &&
           open.st_ino == file.st_ino &&
           contents_of(folder + "info/" + fd).find("lock:") != std::string::npos;
  });
}

// What a process was started as, shortened.
std::string program_of(const std::string& process) {
  std::string words = contents_of("/proc/" + process + "/cmdline");
  std::ranges::replace(words, '\0', ' ');
  std::erase_if(words, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  while (words.ends_with(' ')) words.pop_back();
  if (words.size() > 80) words = words.substr(0, 77) + "...";
  return words;
}

// Who has the file locked: "process 1234 ('train.py')", or "another process" where the system does
// not tell.
std::string lock_holders(int fd) {
  struct stat file{};
  std::string found;
  if (fstat(fd, &file) == 0) {
    const std::string own = std::to_string(getpid());
    for (const std::string& process : numbers_in("/proc")) {
      if (process == own || !has_locked(process, file)) continue;
      (found += found.empty() ? "process " : ", process ") += process;
      if (std::string program = program_of(process); !program.empty())
        ((found += " (") += program) += ')';
    }
    if (found.empty() && has_locked(own, file))
      found = "another sink of this process, which is to be closed first";
  }
  return found.empty() ? "another process" : found;
}

}  // namespace

File::File(std::string what, std::string path, FileUse use)
    : what_(std::move(what)), path_(std::move(path)), place_(use.place) {
  std::error_code ignored;  // open() reports a folder that could not be made
  if (use.makes_folders)
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | (use.appends ? O_APPEND : 0);
  do {
    fd_ = UniqueFd(::open(path_.c_str(), flags, 0666));
  } while (!fd_ && errno == EINTR);
  if (!fd_) fail("open", errno);
  struct stat status{};
  regular_ = ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (!regular_) return;
  const std::lock_guard turn(*this);
  take_place();
  if (use.mode == FileMode::kCreate) truncate(0);
  leave();  // an idle sink is in nobody's way
}

void File::claim() {
  check_process();
  if (!regular_ || has_place_) return;
  const std::lock_guard turn(*this);
  take_place();
}

void File::lock() {
  check_process();
  const auto end = std::chrono::steady_clock::now() + kLongTurn;
  for (std::chrono::microseconds pause(20);; pause = std::min(2 * pause, kLongPause)) {
    if (lock_byte(fd_.get(), kTurn, F_WRLCK)) return;
    if (std::chrono::steady_clock::now() > end)
      throw Error(ErrorCode::kDeadlineExceeded,
                  what_ + ", '" + path_ +
                      "': nothing can be written, since for 10 s it has been locked by " +
                      lock_holders(fd_.get()));
    std::this_thread::sleep_for(pause);
  }
}

void File::unlock() noexcept {
  if (getpid() == process_) lock_byte(fd_.get(), kTurn, F_UNLCK);
}

// In a turn.
void File::take_place() {
  const bool alone = place_ == Place::kAlone;
  if (!lock_byte(fd_.get(), kPlace, alone ? F_WRLCK : F_RDLCK))
    throw Error(
        ErrorCode::kAlreadyExists, what_ + ", '" + path_ + "'",
        alone ? "a file that nobody else writes to" : "a file that others append to, if at all",
        "one that has another writer, " + lock_holders(fd_.get()));
  has_place_ = true;
}

void File::leave() noexcept {
  if (std::exchange(has_place_, false) && getpid() == process_)
    lock_byte(fd_.get(), kPlace, F_UNLCK);
}

void File::check_process() const {
  if (getpid() == process_) return;
  throw Error(ErrorCode::kAborted, what_ + ", '" + path_ +
                                       "': expected to be used by the process that made it, " +
                                       std::to_string(process_) + ", got a fork of that, " +
                                       std::to_string(getpid()) + "; make a sink of its own there");
}

void File::fail(const std::string& doing, int error) const {
  const std::string reason = std::generic_category().message(error);
  throw Error(error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInternal,
              what_ + " cannot " + doing + " '" + path_ + "': " + reason);
}

}  // namespace callgate
