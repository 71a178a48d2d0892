// SPDX-License-Identifier: Apache-2.0
// A Python function as a consumer. It handles exceptions of user code itself. Another exception,
// such as from creating the arrays, loses the records of that call; the losses are counted, and the
// channel reports them. `consume` runs on the channel's thread and takes the GIL once per batch.
//
// The function gets the records of one source, as copies that it may keep, in one of two forms:
//   rows     function(source, [(lane, seq, time_ns, device, run, flags, arrays), ...])
//   stacked  function(source, (lane, seq, time_ns, device, run, flags), arrays), all stacked
// `source` is (id, name, role, description, sizes of the batch levels). `control`, unless None, is
// called with "flush" and "close". With `one_by_one` it calls the user for each row: see Consumer.
#include "bindings/channel/py_consumer.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "channel/channel.h"
#include "core/lifecycle.h"
#include "cuda/copies.h"

namespace callgate::bindings {
namespace {

nb::tuple about_source(const Source& source) {
  return nb::make_tuple(source.id, nb::str(source.name.data(), source.name.size()),
                        static_cast<int>(source.role),
                        nb::str(source.description.data(), source.description.size()),
                        tuple_of(source.lanes.sizes()));
}

// An array that the consumer owns. It uses the record's memory if this is lent and has little other
// data, since a kept array keeps all of that memory alive.
nb::object own_array(const ArrayView& view, const Source& source,
                     const std::shared_ptr<void>& lent) {
  if (!lent || 2 * view.nbytes() < source.payload_bytes || is_packed(view.dtype))
    return make_copy(view);
  nb::capsule base(new std::shared_ptr<void>(lent), [](void* pointer) noexcept {
    delete static_cast<std::shared_ptr<void>*>(pointer);
  });
  return make_array(view, /*writable=*/true, base.ptr());
}

// The leaves of a record whose arrays are on a device, as Buffers that own them.
nb::list device_leaves(const Record& record, std::span<const ArrayView> whole) {
  KeptArrays::One kept = record.source->kept->at(record.handle());
  auto memory = std::dynamic_pointer_cast<cuda::KeptCopies>(kept.memory);
  nb::list leaves;
  if (memory == nullptr) return leaves;
  DeviceCall place{&memory->device(), memory->stream()};
  for (std::size_t i = 0; i < record.source->value_leaves; ++i)
    leaves.append(nb::cast(Buffer(whole[i], place, memory), nb::rv_policy::move));
  return leaves;
}

// A lane's leaf as (Buffer of all lanes, first element, shape).
nb::tuple part_of(const nb::handle& buffer, const ArrayView& whole, const ArrayView& leaf) {
  auto bytes = static_cast<const char*>(leaf.data) - static_cast<const char*>(whole.data);
  return nb::make_tuple(buffer, bytes * 8 / bits(leaf.dtype), tuple_of(leaf.shape()));
}

nb::list rows_of(const Source& source, std::span<const Record> records) {
  nb::list rows;
  RecordViews views(source);
  for (const Record& record : records) {
    std::vector<ArrayView> whole;
    nb::list buffers;
    std::shared_ptr<void> lent;
    if (source.kept != nullptr) {
      std::span<const ArrayView> all = views.whole(record);
      whole.assign(all.begin(), all.end());
      buffers = device_leaves(record, whole);
    } else {
      lent = Channel::lend(record);
    }
    views.each_lane_as_sent(record, [&](std::int64_t lane, std::span<const ArrayView> leaves) {
      nb::list arrays;
      for (std::size_t i = 0; i < leaves.size(); ++i)
        arrays.append(source.kept == nullptr ? own_array(leaves[i], source, lent)
                                             : part_of(buffers[i], whole[i], leaves[i]));
      rows.append(nb::make_tuple(lane, record.seq, record.time_ns, record.device, record.run,
                                 record.flags, nb::tuple(arrays)));
    });
  }
  return rows;
}

// A sent lane.
struct Row {
  const Record* record;
  std::int64_t lane;
};

// An array with one 64-bit number per row.
template <typename Number>
nb::object column(const std::vector<Row>& rows, Number&& number) {
  constexpr bool kSigned = std::is_signed_v<std::invoke_result_t<Number, const Row&>>;
  using T = std::conditional_t<kSigned, std::int64_t, std::uint64_t>;
  auto extent = static_cast<npy_intp>(rows.size());
  nb::object array = taken(PyArray_SimpleNew(1, &extent, kSigned ? NPY_INT64 : NPY_UINT64));
  std::ranges::transform(rows, static_cast<T*>(data_of(array)), number);
  return array;
}

nb::tuple numbers_of(const std::vector<Row>& rows) {
  auto of = [&](auto member) {
    return column(rows, [member](const Row& row) { return row.record->*member; });
  };
  return nb::make_tuple(column(rows, [](const Row& row) { return row.lane; }), of(&Record::seq),
                        of(&Record::time_ns), of(&Record::device), of(&Record::run),
                        of(&Record::flags));
}

// Each leaf of these records' rows as one array.
nb::tuple stacks_of(std::span<const Record> records, const std::vector<Row>& rows) {
  RecordViews views(*records.front().source);
  nb::list stacks;
  std::vector<char*> next;  // the next row of each
  std::shared_ptr<void> lent = rows.size() == 1 ? Channel::lend(*rows[0].record) : nullptr;
  auto add_stack = [&](const ArrayView& leaf) {
    std::vector<npy_intp> dims{static_cast<npy_intp>(rows.size())};
    dims.insert(dims.end(), leaf.dims, leaf.dims + leaf.rank);
    const ArrayView whole{leaf.data, from_numpy(dims.data()), leaf.rank + 1, leaf.dtype};
    PyArray_Descr* descr = descr_of(leaf.dtype);
    nb::object stack;
    if (lent && !is_packed(leaf.dtype)) {
      stack = own_array(whole, *records.front().source, lent);
    } else {
      Py_XINCREF(reinterpret_cast<PyObject*>(descr));  // stolen below
      stack = taken(PyArray_NewFromDescr(&PyArray_Type, descr, whole.rank, as_numpy(whole.dims),
                                         nullptr, nullptr, 0, nullptr));
    }
    next.push_back(static_cast<char*>(data_of(stack)));
    stacks.append(stack);
  };
  for (const Record& record : records) {
    views.each_lane_as_sent(record, [&](std::int64_t, std::span<const ArrayView> leaves) {
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        if (i == next.size()) add_stack(leaves[i]);
        ArrayView row = leaves[i];
        row.data = std::exchange(next[i], next[i] + row.nbytes());
        copy_to(row, leaves[i].data);
      }
    });
  }
  return nb::tuple(stacks);
}

class PyConsumer final : public Consumer {
 public:
  PyConsumer(nb::object function, bool stacked, nb::object control, bool one_by_one)
      : Consumer(one_by_one),
        function_(late(std::move(function))),
        control_(late(std::move(control))),
        stacked_(stacked) {}

  void consume(std::span<const Record> records) override {
    ActiveCall active;
    if (!active.entered()) return;  // Python is ending, and must not be called
    if (function_ == nullptr) return;
    if (stacked_) records = by_source(records);
    GilScope gil;
    // One call per source. A large record with lent memory is passed alone, because stacking it
    // would copy it.
    auto goes_with = [&](const Record& record) {
      bool alone = stacked_ && Channel::lend(record) != nullptr;
      return std::pair(record.source, alone ? &record : nullptr);
    };
    FirstError errors;  // records of other sources are still delivered
    each_run(records, goes_with,
             [&](std::span<const Record> run) { errors.survives([&] { consume_or_lose(run); }); });
    errors.rethrow();
  }

  int visit(visitproc visit, void* arg) const {
    Py_VISIT(function_.get());
    Py_VISIT(control_.get());
    return 0;
  }

  // The references die here, with the GIL, and not later.
  void drop() {
    PyObject* function = function_.release();
    PyObject* control = control_.release();
    Py_XDECREF(function);
    Py_XDECREF(control);
  }

  // Stacked arrays are made on the host.
  bool takes_device_arrays() const noexcept override { return !stacked_; }

  void flush() override { tell("flush"); }
  void close() override { tell("close"); }
  std::string description() const override {
    return stacked_ ? "a Python function with batch=" : "a Python function";
  }

 private:
  void tell(const char* what) {
    ActiveCall active;
    if (!active.entered() || control_ == nullptr || control_.get() == Py_None) return;
    GilScope gil;
    nb::object done = call_python(control_.get(), "s", what);
    if (done.is_valid()) return;
    nb::python_error error;  // takes the exception
    throw std::runtime_error(error.what());
  }

  // Groups the records by source, in their order, unless the order of all matters.
  std::span<const Record> by_source(std::span<const Record> records) {
    const Source* first = records.front().source;
    if (std::ranges::all_of(records, [&](const Record& one) { return one.source == first; }) ||
        std::ranges::any_of(records, [](const Record& one) { return one.source->ordered; })) {
      return records;
    }
    sorted_.assign(records.begin(), records.end());
    std::ranges::stable_sort(sorted_, {}, [](const Record& one) { return one.source->id; });
    return sorted_;
  }

  // Throws a call's exception as a C++ error.
  void consume_or_lose(std::span<const Record> run) try {
    consume_some(*run.front().source, run);
  } catch (const nb::python_error& error) {
    std::uint64_t lanes = 0;
    RecordViews views(*run.front().source);
    for (const Record& record : run)
      views.each_lane_as_sent(record, [&](std::int64_t, std::span<const ArrayView>) { ++lanes; });
    lose(lanes);
    throw std::runtime_error(error.what());
  }

  void consume_some(const Source& source, std::span<const Record> records) {
    nb::tuple about = about_source(source);
    nb::object done;
    if (!stacked_) {
      nb::list rows = rows_of(source, records);
      if (nb::len(rows) == 0) return;
      done = call_python(function_.get(), "OO", about.ptr(), rows.ptr());
    } else {
      std::vector<Row> rows;
      RecordViews views(source);
      for (const Record& record : records)
        views.each_lane_as_sent(record, [&](std::int64_t lane, std::span<const ArrayView>) {
          rows.push_back({&record, lane});
        });
      if (rows.empty()) return;
      nb::tuple numbers = numbers_of(rows), stacks = stacks_of(records, rows);
      done = call_python(function_.get(), "OOO", about.ptr(), numbers.ptr(), stacks.ptr());
    }
    if (!done.is_valid()) nb::raise_python_error();
    // The number of records for which the consumer raised; None if it didn't count.
    const Py_ssize_t failed = PyLong_Check(done.ptr()) ? PyLong_AsSsize_t(done.ptr()) : 0;
    if (failed > 0) lose(static_cast<std::uint64_t>(failed));
  }

  LateReference function_, control_;  // control_ may be None
  bool stacked_;
  std::vector<Record> sorted_;  // of one call of consume()
};

// The consumer, if it is a Python one with a single owner.
template <typename C>
auto* owned_once(C* consumer) {
  using Of = std::conditional_t<std::is_const_v<C>, const PyConsumer, PyConsumer>;
  const bool once = consumer != nullptr && consumer->weak_from_this().use_count() == 1;
  return once ? dynamic_cast<Of*>(consumer) : nullptr;
}

}  // namespace

int visit_consumer(const Consumer* consumer, visitproc visit, void* arg) {
  const PyConsumer* found = owned_once(consumer);
  return found == nullptr ? 0 : found->visit(visit, arg);
}

void clear_consumer(Consumer* consumer) {
  if (PyConsumer* found = owned_once(consumer)) found->drop();
}

void bind_py_consumer(nb::module_& module) {
  module.def(
      "python_consumer",
      [](nb::object function, bool stacked, nb::object control, bool one_by_one) {
        return std::shared_ptr<Consumer>(std::make_shared<PyConsumer>(
            std::move(function), stacked, std::move(control), one_by_one));
      },
      nb::arg("function"), nb::kw_only(), nb::arg("stacked") = false,
      nb::arg("control").none() = nb::none(), nb::arg("one_by_one") = false);
}

}  // namespace callgate::bindings
