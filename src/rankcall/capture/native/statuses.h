// Makes what hooks get, a batch of events at a time. In Python it is the dearest part of an event,
// and whatever an event costs, the training thread waits for: both need the interpreter's lock.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "layout.h"
#include "ring.h"

namespace rankcall {

struct Unref {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Unref>;

// A class of nothing but slots. Its objects are made without running its `__init__`.
class Slotted {
 public:
  // False, with an exception set, if a name is not a slot of the class.
  template <typename Names>
  bool open(PyObject* cls, const Names& names) {
    type_ = reinterpret_cast<PyTypeObject*>(cls);
    for (const char* name : names) {
      Owned found(PyObject_GetAttrString(cls, name));
      if (!found) return false;
      if (Py_TYPE(found.get()) != &PyMemberDescr_Type) {
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type_->tp_name, name);
        return false;
      }
      offsets_.push_back(reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset);
    }
    return true;
  }

  PyObject* make() const { return type_->tp_alloc(type_, 0); }

  // Takes the reference to `value`.
  void set(PyObject* object, size_t slot, PyObject* value) const {
    *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[slot]) = value;
  }

 private:
  PyTypeObject* type_ = nullptr;
  std::vector<Py_ssize_t> offsets_;
};

class Statuses {
 public:
  // Both classes, what every record shares, and names by code or id.
  struct Names {
    PyObject *maker, *rows_object, *labels, *backends, *ops, *statuses, *strings;
  };

  bool open(PyObject* status_class, PyObject* record_class, const Names& names, int64_t epoch_ns) {
    names_ = names;
    epoch_ns_ = epoch_ns;
    static constexpr const char* kRecordSlots[] = {"_maker", "_rows", "_at"};
    return status_.open(status_class, layout::kStatusFields) && record_.open(record_class, kRecordSlots);
  }

  // The status of an op's start or end; null with an exception set.
  PyObject* make(const Record& row, int64_t at, bool ended) const {
    Owned status(status_.make());
    if (!status) return nullptr;
    const int64_t completed = ended ? row.completed_ns : 0;
    const uint8_t issued = row.flags & layout::kFlagDevice ? layout::kEnqueued : layout::kStarted;
    PyObject* fields[] = {  // in the order of layout::kStatusFields
        of_list(names_.labels, row.group),
        of_list(names_.backends, row.group),
        PyLong_FromUnsignedLongLong(row.seq),
        of_tuple(names_.ops, row.op),
        PyLong_FromLongLong((completed ? completed : row.enqueued_ns) + epoch_ns_),
        duration(row, completed),
        PyLong_FromLong(0),
        of_tuple(names_.statuses, ended ? row.status : issued),
        error(row, ended),
        record(at),
    };
    static_assert(std::size(fields) == std::size(layout::kStatusFields));
    bool whole = true;
    size_t slot = 0;
    for (PyObject* field : fields) {
      whole &= field != nullptr;
      status_.set(status.get(), slot++, field);
    }
    return whole ? status.release() : nullptr;
  }

 private:
  // Id 0 stands for no name; so does an id that came after the names were read.
  static PyObject* of_list(PyObject* list, uint32_t id) {
    const auto at = static_cast<Py_ssize_t>(id);
    return Py_NewRef(PyList_GET_ITEM(list, at < PyList_GET_SIZE(list) ? at : 0));
  }

  static PyObject* of_tuple(PyObject* tuple, uint8_t code) {
    PyObject* name = PyTuple_GetItem(tuple, code);
    return Py_XNewRef(name);
  }

  static PyObject* duration(const Record& row, int64_t completed) {
    const bool untimed = (row.flags & layout::kFlagDevice) && std::isnan(row.device_ms);
    if (!completed || untimed) Py_RETURN_NONE;
    return PyFloat_FromDouble(std::isnan(row.device_ms) ? (completed - row.enqueued_ns) / 1e6 : row.device_ms);
  }

  PyObject* error(const Record& row, bool ended) const {
    if (!ended || !row.error) Py_RETURN_NONE;
    Owned id(PyLong_FromUnsignedLong(row.error));
    PyObject* text = id ? PyDict_GetItemWithError(names_.strings, id.get()) : nullptr;
    if (text) return Py_NewRef(text);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }

  PyObject* record(int64_t at) const {
    Owned record(record_.make());
    if (!record) return nullptr;
    record_.set(record.get(), 0, Py_NewRef(names_.maker));
    record_.set(record.get(), 1, Py_NewRef(names_.rows_object));
    PyObject* number = PyLong_FromLongLong(at);
    record_.set(record.get(), 2, number);
    return number ? record.release() : nullptr;
  }

  Slotted status_, record_;
  Names names_{};
  int64_t epoch_ns_ = 0;
};

// A buffer of plain numbers that is given back when this goes.
class Numbers {
 public:
  ~Numbers() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  bool open(PyObject* object) { return PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) == 0; }
  template <typename T>
  const T* data() const {
    return static_cast<const T*>(view_.buf);
  }
  size_t bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

// statuses(classes, names, epoch_ns, rows as bytes, at as int64, ended as bytes) -> list
inline PyObject* make_statuses(PyObject*, PyObject* args) {
  PyObject *status_class, *record_class, *rows_object, *at_object, *ended_object;
  Statuses::Names names;
  long long epoch_ns;
  if (!PyArg_ParseTuple(args, "(O!O!)(OOO!O!O!O!O!)LOOO", &PyType_Type, &status_class, &PyType_Type, &record_class,
                        &names.maker, &names.rows_object, &PyList_Type, &names.labels, &PyList_Type, &names.backends,
                        &PyTuple_Type, &names.ops, &PyTuple_Type, &names.statuses, &PyDict_Type, &names.strings,
                        &epoch_ns, &rows_object, &at_object, &ended_object))
    return nullptr;
  Statuses statuses;
  Numbers rows, at, ended;
  if (!statuses.open(status_class, record_class, names, epoch_ns) || !rows.open(rows_object) || !at.open(at_object) ||
      !ended.open(ended_object))
    return nullptr;
  const size_t count = ended.bytes();
  if (at.bytes() != count * sizeof(int64_t) || !PyList_GET_SIZE(names.labels) || !PyList_GET_SIZE(names.backends)) {
    PyErr_SetString(PyExc_ValueError, "columns of different lengths, or no name for what has none");
    return nullptr;
  }
  const auto* records = rows.data<Record>();
  const auto known = static_cast<int64_t>(rows.bytes() / sizeof(Record));
  Owned made(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; made && i < count; i++) {
    const int64_t row = at.data<int64_t>()[i];
    if (row < 0 || row >= known) {
      PyErr_SetString(PyExc_IndexError, "no such row");
      return nullptr;
    }
    PyObject* status = statuses.make(records[row], row, ended.data<uint8_t>()[i] != 0);
    if (!status) return nullptr;
    PyList_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), status);
  }
  return made.release();
}

}  // namespace rankcall
