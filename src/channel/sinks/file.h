// The file of a sink: an owned descriptor whose errors are thrown and name the sink and the path.
//
// Used by one thread at a time. Nothing is buffered here: what is written is the system's, so a
// process that dies loses none of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace callgate {

enum class FileMode {
  kCreate,  // an existing file is emptied
  kAppend,  // an existing file is kept, a missing one made
};

class File {
 public:
  // Makes the folders above `path` as well. `sink` is for messages: "JSONL".
  File(std::string_view sink, const std::string& path, FileMode mode);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const noexcept { return path_; }

  // False for a pipe or a terminal: it has neither a size nor places.
  bool regular() const noexcept { return regular_; }
  std::uint64_t size() const;
  void truncate(std::uint64_t size);

  // Writes all of `bytes` at the end; when that fails, a regular file is as it was before.
  void append(std::string_view bytes);
  // Writes all of `bytes` at `offset`.
  void write_at(std::uint64_t offset, std::string_view bytes);
  // At most `count` bytes from `offset`: fewer at the end of the file.
  std::string read_at(std::uint64_t offset, std::size_t count) const;

  // Throws where the system reports a failure to store what was written. Idempotent.
  void close();

 private:
  [[noreturn]] void fail(const char* doing) const;

  std::string sink_, path_;
  int descriptor_ = -1;
  bool regular_ = false;
};

}  // namespace callgate
