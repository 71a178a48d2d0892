// The file that a stream is appended to. Belongs to one thread at a time.
//
// One writer a file: it holds a lock (flock) until it ends; who comes meanwhile is told its
// process. What an earlier writer left incomplete at the end is cut off when the file is opened; a
// file that is no stream, or is damaged before its end, is refused and left as it is.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "channel/stream_encoder.h"
#include "channel/unique_fd.h"

namespace callgate {

class StreamFile {
 public:
  // Opens or makes it. Throws Error naming the path.
  explicit StreamFile(std::string path);
  ~StreamFile() { close(); }
  StreamFile(const StreamFile&) = delete;
  StreamFile& operator=(const StreamFile&) = delete;

  // Appends the batch, in one system call where the system takes it. On an error, which is thrown,
  // the frames that found room are in the file, none in part; `records` is how many of them are
  // records.
  void write(const StreamBatch& batch, std::uint64_t& records);

  // Others may write from now on. In a fork's child, whose parent may be writing, the lock stays.
  void close() noexcept;

  // Bytes of whole frames.
  std::uint64_t size() const noexcept { return size_; }
  const std::string& path() const noexcept { return path_; }

 private:
  void cut();
  void keep_whole_frames(std::uint64_t written, std::uint64_t& records);
  [[noreturn]] void fail(const std::string& step) const;

  std::string path_;
  UniqueFd fd_;
  pid_t process_ = getpid();
  std::uint64_t size_ = 0;
  bool torn_ = false;  // bytes of a batch that failed may be behind `size_`
  std::vector<iovec> pieces_;
};

}  // namespace callgate
