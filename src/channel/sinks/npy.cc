// SPDX-License-Identifier: Apache-2.0
// Columns of .npy files that grow by rows.
#include "channel/sinks/npy.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <set>
#include <type_traits>

namespace callgate {
namespace {

void append_row(std::string& out, const ArrayView& view) {
  auto append = [&](auto value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  if (npy_stores_as_is(view.dtype)) {
    out.append(static_cast<const char*>(view.data), view.nbytes());
    return;
  }
  each_element(view, [&](auto value) {
    using T = decltype(value);
    if constexpr (std::is_same_v<T, float>) append(value);
    if constexpr (std::is_same_v<T, std::int64_t>) append(static_cast<std::int8_t>(value));
    if constexpr (std::is_same_v<T, std::uint64_t>) append(static_cast<std::uint8_t>(value));
  });
}

}  // namespace

std::string ShardRow::descr(std::size_t rank) {
  constexpr std::string_view kOrder = std::endian::native == std::endian::little ? "<" : ">";
  auto field = [&](std::string_view name, std::string_view type, const std::string& shape) {
    return "('" + std::string(name) + "', '" + std::string(kOrder) + std::string(type) + "'" +
           (shape.empty() ? "" : ", " + shape) + ")";
  };
  const std::string extents = std::to_string(rank);
  return "[" + field("seq", "u8", "") + ", " + field("time_ns", "i8", "") + ", " +
         field("run", "i8", "") + ", " + field("process", "i8", "") + ", " +
         field("device", "i8", "") + ", " + field("global_shape", "i8", "(" + extents + ",)") +
         ", " + field("shard", "i8", "(" + extents + ", 2)") + "]";
}

std::string ShardRow::of(const Record& record, const LeafPart& part, std::int64_t process) {
  std::vector<std::int64_t> numbers{static_cast<std::int64_t>(record.seq), record.time_ns,
                                    record.run, process, record.device};
  numbers.insert(numbers.end(), part.whole.begin(), part.whole.end());
  for (std::size_t axis = 0; axis < part.whole.size(); ++axis)
    numbers.insert(numbers.end(), {part.begin[axis], part.end[axis]});
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::int64_t)};
}

NpyColumn::NpyColumn(std::string name, const ArrayView& view, const std::string& path,
                     FileMode mode)
    : NpyColumn(std::move(name), npy_descr(view.dtype), {view.shape().begin(), view.shape().end()},
                std::stoul(npy_descr(view.dtype).substr(2)) * view.size(), path, mode) {}

NpyColumn::NpyColumn(std::string name, const std::string& descr,
                     const std::vector<std::int64_t>& row, std::size_t row_bytes,
                     const std::string& path, FileMode mode)
    : name_(std::move(name)), file_("the sink Npy", path, {.mode = mode}), row_bytes_(row_bytes) {
  if (!file_.regular()) throw Error("the sink Npy", "a regular file", "'" + path + "'");
  file_.claim();
  file_.size() == 0 ? start(descr, row) : resume(descr, row);
}

void NpyColumn::check(const std::string& name, const std::string& descr,
                      std::span<const std::int64_t> row) const {
  auto refuse = [&](const std::string& expected, const std::string& got) {
    throw Error("the sink Npy writes '" + file_.path() + "'", expected, got);
  };
  if (name != name_)
    refuse("the leaf '" + name_ + "' only; put {name} into the path for a file for each leaf",
           "'" + name + "' as well");
  const std::string have = "rows of " + type_text(header_.descr, header_.row);
  const std::string got = "rows of " + type_text(descr, row);
  if (have != got) refuse("'" + name + "' to be " + have, got);
}

void NpyColumn::begin() {
  file_.claim();
  start_ = header_.rows;
  offered_ = 0;
  error_ = 0;
}

void NpyColumn::append(const ArrayView& view) {
  if (rows_.size() >= kManyBytes) write_rows();
  // Otherwise it would follow rows without room.
  if (error_ == 0) append_whole(rows_, [&] { append_row(rows_, view); });
  ++offered_;
}

void NpyColumn::append(std::string_view row) {
  if (rows_.size() >= kManyBytes) write_rows();
  if (error_ == 0) rows_ += row;
  ++offered_;
}

void NpyColumn::take_back() noexcept {
  --offered_;
  if (error_ == 0) rows_.resize(rows_.size() - row_bytes_);
}

void NpyColumn::write_rows() {
  const std::string rows = std::exchange(rows_, {});
  const Transfer done = file_.write_at(end(), rows);
  header_.rows = row_bytes_ == 0 ? start_ + offered_ : header_.rows + done.bytes / row_bytes_;
  if (done.error != 0) error_ = done.error;
}

void NpyColumn::keep(std::uint64_t count) {
  header_.rows = start_ + std::min(count, written());
  file_.truncate(end());
}

void NpyColumn::count_rows() {
  if (counted_ != header_.rows) write_header();
  counted_ = header_.rows;
  if (error_ != 0) file_.fail("write to", error_);
}

void NpyColumn::start(const std::string& descr, const std::vector<std::int64_t>& row) {
  header_ = {descr, row};
  header_.bytes = header_.text().size();
  FirstError error;
  if (!error.survives([&] { write_header(); })) file_.cut(0);  // half a header is invalid
  error.rethrow();
}

void NpyColumn::resume(const std::string& descr, const std::vector<std::int64_t>& row) {
  header_ = NpyHeader::parse(file_.read_at(0, NpyHeader::kLimit), file_.path());
  check(name_, descr, row);
  const std::uint64_t bytes = file_.size() - header_.bytes;
  counted_ = header_.rows;
  if (row_bytes_ != 0) header_.rows = std::min(header_.rows, bytes / row_bytes_);
  file_.truncate(end());
}

void NpyColumn::write_header() {
  const Transfer done = file_.write_at(0, header_.text());
  if (done.error != 0) file_.fail("write to", done.error);
}

void NpySink::close() {
  std::lock_guard lock(mutex_);
  sources_ = {};
  rows_.clear();
  auto columns = std::exchange(columns_, {});
  for (auto& [path, column] : columns) column->close();
}

std::string NpySink::file_of(std::string part) const {
  constexpr std::string_view kPlaceholder = "{name}", kOdd = "/\\:*?\"<>|";
  for (char& c : part)
    if (static_cast<unsigned char>(c) < 0x20 || kOdd.find(c) != std::string_view::npos) c = '_';
  if (part.starts_with('.')) part.front() = '_';
  std::string file = path_;
  for (std::size_t at = file.find(kPlaceholder); at != std::string::npos;
       at = file.find(kPlaceholder, at + part.size()))
    file.replace(at, kPlaceholder.size(), part);
  return file;
}

NpyColumn* NpySink::column(const std::string& name, const ArrayView& view) {
  return column(name, file_of(name), npy_descr(view.dtype),
                {view.shape().begin(), view.shape().end()},
                std::stoul(npy_descr(view.dtype).substr(2)) * view.size());
}

NpyColumn* NpySink::shards_column(const std::string& name, std::size_t rank) {
  std::string file = file_of(name);
  const std::size_t end = file.ends_with(".npy") ? file.size() - 4 : file.size();
  file.insert(end, ".shard");
  return column(name, file, ShardRow::descr(rank), {}, (5 + 3 * rank) * sizeof(std::int64_t));
}

NpyColumn* NpySink::column(const std::string& name, const std::string& file,
                           const std::string& descr, const std::vector<std::int64_t>& row,
                           std::size_t row_bytes) {
  auto found = columns_.find(file);
  if (found == columns_.end())
    found = columns_.emplace(file, new_column(name, file, descr, row, row_bytes)).first;
  found->second->check(name, descr, row);
  return found->second.get();
}

std::unique_ptr<NpyColumn> NpySink::new_column(const std::string& name, const std::string& file,
                                               const std::string& descr,
                                               const std::vector<std::int64_t>& row,
                                               std::size_t row_bytes) {
  std::optional<FileMode>& mode = modes_.try_emplace(file, mode_).first->second;
  if (!mode)
    throw Error(
        ErrorCode::kAlreadyExists, "the sink Npy, '" + file + "'", "a file without another writer",
        "a file that another sink wrote when the first row came; use one file for each sink");
  try {
    auto column = std::make_unique<NpyColumn>(name, descr, row, row_bytes, file, *mode);
    column->begin();
    mode = FileMode::kAppend;
    return column;
  } catch (const Error& error) {
    if (mode == FileMode::kCreate && error.code() == ErrorCode::kAlreadyExists) mode.reset();
    throw;
  }
}

void NpySink::take(const Record& record) {
  NamedSources::Named& source = sources_.of("the sink Npy", *record.source);
  std::vector<NpyColumn*>& row = rows_[record.source->id];
  visit_lanes(source.views, record, [&](std::int64_t, std::span<const ArrayView> leaves) {
    // All columns are found before any gets a row. Each padded array may have another shape.
    if (row.empty() || !record.source->padded.empty()) {
      std::vector<NpyColumn*> found;
      found.reserve(leaves.size());
      for (std::size_t i = 0; i < leaves.size(); ++i)
        found.push_back(column(source.names[i], leaves[i]));
      for (std::size_t i = 0; i < leaves.size(); ++i)
        if (const auto part = part_of(record, i))
          found.push_back(shards_column(source.names[i], part->whole.size()));
      row = std::move(found);
    }
    std::size_t done = 0;
    try {
      for (; done < leaves.size(); ++done) row[done]->append(leaves[done]);
      for (std::size_t i = 0; done < row.size() && i < leaves.size(); ++i)
        if (const auto part = part_of(record, i))
          row[done++]->append(ShardRow::of(record, *part, process_));
    } catch (...) {  // the columns stay in step
      while (done-- > 0) row[done]->take_back();
      throw;
    }
  });
}

void NpySink::align(const std::vector<NpyColumn*>& columns) {
  std::uint64_t lost = 0;
  for (const NpyColumn* column : columns)
    lost = std::max(lost, column->offered() - column->written());
  if (lost == 0) return;
  auto in_step = [&](const NpyColumn* column) {
    return column->offered() == columns.front()->offered();
  };
  if (std::ranges::all_of(columns, in_step))
    for (NpyColumn* column : columns) column->keep(column->offered() - lost);
  lose(lost);
}

void NpySink::write() {
  for (auto& [path, column] : columns_) column->write_rows();
  std::set<std::vector<NpyColumn*>> seen;  // taps that are traced again share their columns
  for (const auto& [id, row] : rows_)
    if (seen.insert(row).second) align(row);
  FirstError errors;
  for (auto& [path, column] : columns_) errors.survives([&] { column->count_rows(); });
  errors.rethrow();
}

}  // namespace callgate
