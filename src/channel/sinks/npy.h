// The sink Npy: each leaf a .npy file that grows by a row for each lane of each record.
//
// The header's first extent is rewritten in place after the rows that it counts are in the file, at
// the end of each batch: np.load reads the file at any time, also after a crash, and rows that the
// header does not count yet are written over. Where there is room for a part of a batch alone, the
// files have the same first rows of it. A file is written by one sink at a time (FileLock).
// dtypes that NumPy lacks are widened (npy_descr).
//
// Runs on its channel's thread, without the GIL; other threads may use it as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "core/dtype.h"

namespace callgate {

// The header of a .npy file whose first axis grows: see NpyHeader.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

// NumPy's name of the element type of a column: "<f4". A dtype that NumPy lacks is stored as the
// smallest of NumPy's that holds all its values: float32 for bfloat16 and smaller floats, int8 and
// uint8 for packed integers.
std::string npy_descr(DType dtype);

// True where a column holds the elements as they are in memory.
bool npy_stores_as_is(DType dtype) noexcept;

struct NpyHeader {
  std::string descr;
  std::vector<std::int64_t> row;  // extents of a row: the array's without the first
  std::uint64_t rows = 0;
  std::size_t bytes = 0;  // of the header, from the start of the file to the first element

  // The text, padded to `bytes`, or, where that is 0, to a multiple of 64 with room for any number
  // of rows. Throws Error where `bytes` is too few.
  std::string text() const;

  // Reads the start of a file; throws Error naming `path` unless a growing C-ordered array is
  // there.
  static NpyHeader parse(std::string_view file, const std::string& path);
};

// The most bytes of a file that NpyHeader::parse needs.
inline constexpr std::size_t kNpyHeaderLimit = 10 + 65535;

class NpySink final : public Consumer {
 public:
  // `path` may hold "{name}", which is replaced by the leaf's name (names.h) with '_' for what does
  // not belong into a file's name; without it there is one leaf, and a second one is an error. With
  // kAppend, files that exist grow on. After close(), further records open the files again.
  NpySink(std::string path, FileMode mode);
  ~NpySink() override;

  // Throws Error for a leaf whose dtype or shape is not the file's; a record is taken whole or not
  // at all.
  void consume(std::span<const Record> records) override;
  void close() override;
  std::string description() const override { return "Npy('" + path_ + "')"; }

 private:
  class Column;

  // What a column holds a row of each lane of: a leaf, by its name (names.h), of a tap.
  struct Leaf {
    std::string name, tap;
    DType dtype;
    std::span<const std::int64_t> row;
  };

  // The columns of the leaves of one source, and its views.
  struct Layout {
    explicit Layout(const Source& source) : views(source) {}
    RecordViews views;
    std::vector<Column*> columns;
  };

  Column& column(const Leaf& leaf);
  std::unique_ptr<Column> new_column(const Leaf& leaf, const std::string& file);
  std::string file_of(const std::string& name) const;
  void resolve(Layout& layout, const Source& source, std::span<const ArrayView> leaves);
  void append_record(const Record& record);
  void align(const std::vector<Column*>& columns);
  void write_out();

  std::mutex mutex_;  // guards what follows: Python may write and close beside a channel
  std::string path_;
  FileMode mode_;
  std::set<std::string> made_;     // by this sink: opened again they grow on
  std::set<std::string> refused_;  // another's when they were to be made
  std::map<std::string, std::unique_ptr<Column>> columns_;  // by path
  std::unordered_map<std::uint64_t, Layout> layouts_;       // by Source::id
};

}  // namespace callgate
