// SPDX-License-Identifier: Apache-2.0
// Files of sinks: their writers, appends that fail as a whole, and messages with the cause.
#include "channel/sinks/file.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace callgate {
namespace {

// The entries of a folder whose names are numbers.
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

// True if a process has the file open and locked.
bool has_locked(const std::string& process, const struct stat& file) {
  const std::string folder = "/proc/" + process + "/fd";
  return std::ranges::any_of(numbers_in(folder), [&](const std::string& fd) {
    struct stat open{};
    return stat((folder + '/' + fd).c_str(), &open) == 0 && open.st_dev == file.st_dev &&
           open.st_ino == file.st_ino &&
           contents_of(folder + "info/" + fd).find("lock:") != std::string::npos;
  });
}

// The command that started a process, shortened.
std::string program_of(const std::string& process) {
  std::string words = contents_of("/proc/" + process + "/cmdline");
  std::ranges::replace(words, '\0', ' ');
  std::erase_if(words, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  while (words.ends_with(' ')) words.pop_back();
  if (words.size() > 80) words = words.substr(0, 77) + "...";
  return words;
}

// The owner of the file's lock: "process 1234 ('train.py')", or "another process" if the system
// doesn't report it.
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
      found = "another sink of this process; close it first";
  }
  return found.empty() ? "another process" : found;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

File::File(std::string what, std::string path, FileUse use)
    : what_(std::move(what)), path_(std::move(path)), place_(use.place) {
  const bool reads = use.mode == FileMode::kRead;
  std::error_code ignored;  // open() reports a folder that could not be created
  if (use.makes_folders && !reads)
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  const int flags = reads ? O_RDONLY : O_RDWR | O_CREAT | (use.appends ? O_APPEND : 0);
  do {
    fd_ = UniqueFd(::open(path_.c_str(), flags | O_CLOEXEC, 0666));
  } while (!fd_ && errno == EINTR);
  if (!fd_) fail("open", errno);
  struct stat status{};
  regular_ = ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (!regular_ || reads) return;
  const std::lock_guard turn(*this);
  take_place();
  if (use.mode == FileMode::kCreate) truncate(0);
  leave();  // an idle sink blocks no other
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
                  who() + ": the file can't be written, because it has been locked for 10 s by " +
                      lock_holders(fd_.get()));
    std::this_thread::sleep_for(pause);
  }
}

std::uint64_t File::size() const {
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) fail("read the size of", errno);
  return static_cast<std::uint64_t>(status.st_size);
}

Transfer File::write_at(std::uint64_t offset, std::string_view bytes) noexcept {
  return transfer_all(bytes.size(), ENOSPC, [&](std::size_t done) {
    return ::pwrite(fd_.get(), bytes.data() + done, bytes.size() - done,
                    static_cast<off_t>(offset + done));
  });
}

std::string File::read_at(std::uint64_t offset, std::size_t count) const {
  std::string bytes(count, '\0');
  const Transfer done = transfer_all(count, /*nothing=*/0, [&](std::size_t so_far) {
    return ::pread(fd_.get(), bytes.data() + so_far, count - so_far,
                   static_cast<off_t>(offset + so_far));
  });
  if (done.error != 0) fail("read", done.error);
  bytes.resize(done.bytes);
  return bytes;
}

void File::close() {
  if (!fd_) return;
  leave();
  // Not repeated after EINTR, because Linux has closed the descriptor by then.
  if (::close(fd_.release()) != 0 && errno != EINTR) fail("close", errno);
}

void File::fail(const std::string& doing, int error) const {
  throw Error(
      error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInternal,
      what_ + " cannot " + doing + " '" + path_ + "': " + std::generic_category().message(error));
}

void File::check_process() const {
  if (getpid() == process_) return;
  throw Error(ErrorCode::kAborted, who() + ": expected writes by process " +
                                       std::to_string(process_) +
                                       ", which made the sink, got its forked process " +
                                       std::to_string(getpid()) + "; make a sink in each process");
}

void File::take_place() {
  const bool alone = place_ == Place::kAlone;
  if (!lock_byte(fd_.get(), kPlace, alone ? F_WRLCK : F_RDLCK))
    throw Error(ErrorCode::kAlreadyExists, who(),
                alone ? "a file without another writer" : "a file that other sinks only append to",
                "a file that is open for writing in " + lock_holders(fd_.get()));
  has_place_ = true;
}

void File::leave() noexcept {
  if (std::exchange(has_place_, false) && getpid() == process_)
    lock_byte(fd_.get(), kPlace, F_UNLCK);
}

bool File::lock_byte(int fd, off_t byte, short type) noexcept {
  struct flock lock{};  // its members have a different order on each system
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  while (fcntl(fd, kSetFileLock, &lock) != 0)
    if (errno != EINTR) return errno != EAGAIN && errno != EACCES;
  return true;
}

void UnitFile::begin_at(std::uint64_t end) {
  end_ = end;
  if (!cut_rest()) fail("shorten", errno);
}

void UnitFile::append(std::span<iovec> pieces, std::span<const std::size_t> ends,
                      std::size_t& written) {
  written = 0;
  if (torn_ && !cut_rest()) fail("shorten", errno);
  torn_ = true;
  std::size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  const Transfer done = transfer_all(bytes, ENOSPC, [&](std::size_t) {
    const auto count = static_cast<int>(std::min(pieces.size(), kMostPieces));
    const ssize_t moved = ::writev(fd(), pieces.data(), count);
    if (moved > 0) pieces = without(pieces, static_cast<std::size_t>(moved));
    return moved;
  });
  const auto whole = std::ranges::upper_bound(ends, done.bytes);
  written = static_cast<std::size_t>(whole - ends.begin());
  if (done.error == 0) {
    end_ += bytes;
    torn_ = false;
    return;
  }
  if (written != 0) end_ += ends[written - 1];
  cut_rest();  // otherwise it is cut off before the next unit
  fail("write to", done.error);
}

std::span<iovec> UnitFile::without(std::span<iovec> pieces, std::size_t bytes) noexcept {
  for (; bytes >= pieces.front().iov_len && pieces.size() > 1; pieces = pieces.subspan(1))
    bytes -= pieces.front().iov_len;
  pieces.front().iov_base = static_cast<char*>(pieces.front().iov_base) + bytes;
  pieces.front().iov_len -= bytes;
  return pieces;
}

bool UnitFile::cut_rest() noexcept {
  torn_ = !cut(end_) || ::lseek(fd(), static_cast<off_t>(end_), SEEK_SET) < 0;
  return !torn_;
}

}  // namespace callgate
