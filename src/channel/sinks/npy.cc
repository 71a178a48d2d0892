// See the header.
#include "channel/sinks/npy.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include "channel/consumer.h"
#include "channel/sinks/elements.h"
#include "channel/sinks/names.h"
#include "core/error.h"

namespace callgate {
namespace {

constexpr std::size_t kRowBytes = std::size_t{1} << 20;  // larger writes gain nothing
constexpr std::string_view kPlaceholder = "{name}";

template <typename T>
void append_bytes(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// The elements as the file holds them.
void append_row(std::string& out, const ArrayView& view) {
  if (npy_stores_as_is(view.dtype)) {
    out.append(static_cast<const char*>(view.data), view.nbytes());
    return;
  }
  each_element(view, [&](auto value) {
    using T = decltype(value);
    if constexpr (std::is_same_v<T, float>) append_bytes(out, value);
    if constexpr (std::is_same_v<T, std::int64_t>)
      append_bytes(out, static_cast<std::int8_t>(value));
    if constexpr (std::is_same_v<T, std::uint64_t>)
      append_bytes(out, static_cast<std::uint8_t>(value));
  });
}

std::string to_text(const std::string& descr, std::span<const std::int64_t> row) {
  std::string text = "rows of " + descr + "[";
  for (std::size_t axis = 0; axis < row.size(); ++axis) {
    if (axis != 0) text += ',';
    text += std::to_string(row[axis]);
  }
  return text + "]";
}

// A name as a part of a file's name.
std::string file_part(std::string_view name) {
  std::string part(name);
  for (char& c : part) {
    const bool odd = std::string_view("/\\:*?\"<>|").find(c) != std::string_view::npos;
    if (odd || static_cast<unsigned char>(c) < 0x20) c = '_';
  }
  if (part.starts_with('.')) part.front() = '_';
  return part;
}

}  // namespace

// One file. Rows wait in memory until the batch ends or they are many.
class NpySink::Column {
 public:
  Column(const Leaf& leaf, const std::string& path, FileMode mode)
      : name_(leaf.name),
        tap_(leaf.tap),
        file_("Npy", path, mode, Place::kAlone, /*appends=*/false) {
    if (!file_.regular())
      throw Error(ErrorCode::kInvalidArgument, "the sink Npy", "a regular file", "'" + path + "'");
    header_.descr = npy_descr(leaf.dtype);
    header_.row.assign(leaf.row.begin(), leaf.row.end());
    row_bytes_ = std::stoul(header_.descr.substr(2));
    for (std::int64_t extent : leaf.row) row_bytes_ *= static_cast<std::size_t>(extent);
    file_.claim();
    if (file_.size() == 0) {
      header_.bytes = header_.text().size();
      if (const int error = write_header(); error != 0) {
        file_.truncate(0);  // half a header is no beginning
        file_.fail("write to", error);
      }
    } else {
      resume(leaf);
    }
  }

  // Throws Error unless the leaf fits this file.
  void check(const Leaf& leaf) const {
    auto refuse = [&](const std::string& expected, const std::string& got) {
      throw Error(ErrorCode::kInvalidArgument, "the sink Npy writes '" + file_.path() + "'",
                  expected, got);
    };
    const std::string quoted = "'" + leaf.name + "'";
    if (leaf.name != name_)
      refuse("the leaf '" + name_ + "' alone, or a path with {name} for a file each",
             quoted + " as well");
    if (leaf.tap != tap_)  // {"b": x} of the tap 'a', and the tap 'a/b'
      refuse(quoted + " of the tap '" + tap_ + "'", "that of the tap '" + leaf.tap + "'");
    const std::string have = to_text(header_.descr, header_.row);
    const std::string got = to_text(npy_descr(leaf.dtype), leaf.row);
    if (have != got) refuse(quoted + " to be " + have, got);
  }

  // A batch begins: rows are counted from here.
  void begin() {
    file_.claim();
    start_ = header_.rows;
    offered_ = 0;
    error_ = 0;
  }

  // Where it throws, the column is as it was.
  void append(const ArrayView& view) {
    if (error_ == 0) {  // else it would be behind rows that found no room
      append_whole(rows_, [&] { append_row(rows_, view); });
      ++waiting_;
    }
    ++offered_;
  }

  // Takes the last row back, which has not been written.
  void take_back() noexcept {
    --offered_;
    if (error_ != 0) return;
    --waiting_;
    rows_.resize(rows_.size() - row_bytes_);
  }

  bool has_many() const noexcept { return rows_.size() >= kRowBytes; }

  // Writes what waits, as far as there is room: whole rows.
  void write_rows() {
    const std::string rows = std::exchange(rows_, {});
    const std::uint64_t count = std::exchange(waiting_, 0);
    const Written done = file_.write_at(header_.bytes + header_.rows * row_bytes_, rows);
    header_.rows += row_bytes_ == 0 ? count : done.bytes / row_bytes_;
    if (done.error != 0) error_ = done.error;
  }

  // Of the batch.
  std::uint64_t offered() const noexcept { return offered_; }
  std::uint64_t written() const noexcept { return header_.rows - start_; }

  // Cuts the batch's rows down to the first `count`.
  void keep(std::uint64_t count) {
    header_.rows = start_ + std::min(count, written());
    file_.truncate(header_.bytes + header_.rows * row_bytes_);
  }

  // After the rows, the header that counts them.
  void count_rows() {
    if (counted_ != header_.rows) {
      if (const int error = write_header(); error != 0) file_.fail("write to", error);
      counted_ = header_.rows;
    }
    if (error_ != 0) file_.fail("write to", error_);
  }

  void close() { file_.close(); }

 private:
  // Goes on after the rows that the file counts and has; what a crash left behind them is cut off.
  void resume(const Leaf& leaf) {
    header_ = NpyHeader::parse(file_.read_at(0, kNpyHeaderLimit), file_.path());
    check(leaf);
    const std::uint64_t bytes = file_.size() - header_.bytes;
    counted_ = header_.rows;
    if (row_bytes_ != 0) header_.rows = std::min(header_.rows, bytes / row_bytes_);
    file_.truncate(header_.bytes + header_.rows * row_bytes_);
  }

  int write_header() { return file_.write_at(0, header_.text()).error; }

  std::string name_, tap_;
  File file_;
  NpyHeader header_;
  std::size_t row_bytes_ = 0;
  std::uint64_t counted_ = 0;  // rows, by the header in the file
  std::uint64_t waiting_ = 0;  // rows in rows_
  std::uint64_t start_ = 0;    // rows before the batch
  std::uint64_t offered_ = 0;  // rows that the batch brought
  int error_ = 0;              // why not all of them could be written; 0
  std::string rows_;
};

NpySink::NpySink(std::string path, FileMode mode) : path_(std::move(path)), mode_(mode) {}

NpySink::~NpySink() = default;

std::string NpySink::file_of(const std::string& name) const {
  std::string file = path_;
  const std::string part = file_part(name);
  for (std::size_t at = file.find(kPlaceholder); at != std::string::npos;
       at = file.find(kPlaceholder, at + part.size())) {
    file.replace(at, kPlaceholder.size(), part);
  }
  return file;
}

NpySink::Column& NpySink::column(const Leaf& leaf) {
  const std::string file = file_of(leaf.name);
  auto found = columns_.find(file);
  if (found == columns_.end()) found = columns_.emplace(file, new_column(leaf, file)).first;
  found->second->check(leaf);
  return *found->second;
}

std::unique_ptr<NpySink::Column> NpySink::new_column(const Leaf& leaf, const std::string& file) {
  if (refused_.contains(file)) {
    throw Error(ErrorCode::kAlreadyExists, "the sink Npy, '" + file + "'",
                "a file that nobody else writes to",
                "one that another sink wrote when the first row came; it is not begun anew");
  }
  const FileMode mode = made_.contains(file) ? FileMode::kAppend : mode_;
  try {
    auto column = std::make_unique<Column>(leaf, file, mode);
    column->begin();
    made_.insert(file);
    return column;
  } catch (const Error& error) {
    if (mode == FileMode::kCreate && error.code() == ErrorCode::kAlreadyExists)
      refused_.insert(file);
    throw;
  }
}

// Finds all columns before any of them gets a row. `leaves`: those of one lane.
void NpySink::resolve(Layout& layout, const Source& source, std::span<const ArrayView> leaves) {
  std::vector<Column*> columns;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::string name = column_name(source, source.leaves[i]);
    Column* next = &column({name, source.name, leaves[i].dtype, leaves[i].shape()});
    if (std::find(columns.begin(), columns.end(), next) != columns.end())
      throw Error(ErrorCode::kInvalidArgument, "the sink Npy", "leaves with names of their own",
                  "two leaves '" + name + "'");
    columns.push_back(next);
  }
  layout.columns = std::move(columns);
}

void NpySink::append_record(const Record& record) {
  Layout& layout = layouts_.try_emplace(record.source->id, *record.source).first->second;
  visit_lanes(*this, layout.views, record, [&](std::int64_t, std::span<const ArrayView> leaves) {
    // Of padded arrays each record may have another shape.
    if (layout.columns.empty() || !record.source->padded.empty())
      resolve(layout, *record.source, leaves);
    std::size_t done = 0;
    try {
      for (; done < leaves.size(); ++done) layout.columns[done]->append(leaves[done]);
    } catch (...) {  // the columns stay in step
      while (done-- > 0) layout.columns[done]->take_back();
      throw;
    }
    for (Column* column : layout.columns)
      if (column->has_many()) column->write_rows();
  });
}

// The leaves of a record have rows in step: where one found no room, the others give theirs up.
void NpySink::align(const std::vector<Column*>& columns) {
  if (columns.empty()) return;
  std::uint64_t offered = 0, written = columns.front()->written();
  bool in_step = true;
  for (const Column* column : columns) {
    in_step = in_step && (offered == 0 || offered == column->offered());
    offered = std::max(offered, column->offered());
    written = std::min(written, column->written());
  }
  if (written >= offered) return;
  if (in_step) {
    for (Column* column : columns) column->keep(written);
  }
  lose(offered - written);
}

void NpySink::write_out() {
  for (auto& [path, column] : columns_) column->write_rows();
  std::set<std::vector<Column*>> seen;  // taps that are traced again share their columns
  for (auto& [id, layout] : layouts_) {
    if (seen.insert(layout.columns).second) align(layout.columns);
  }
  FirstError errors;
  for (auto& [path, column] : columns_) errors.survives([&] { column->count_rows(); });
  errors.rethrow();
}

void NpySink::consume(std::span<const Record> records) {
  std::lock_guard lock(mutex_);
  auto begin = [&] {
    for (auto& [path, column] : columns_) column->begin();
  };
  auto take = [&](const Record& record) { append_record(record); };
  consume_each(*this, records, begin, take, [&] { write_out(); });
}

void NpySink::close() {
  std::lock_guard lock(mutex_);
  layouts_.clear();
  auto columns = std::exchange(columns_, {});
  for (auto& [path, column] : columns) column->close();
}

}  // namespace callgate
