// The native recorder, as a Python module.
//
// All headers are compiled as one unit: torch's headers take far longer than these. Everything is
// internal to the unit, so that a kernel reaches globals and functions directly.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>

#include <memory>
#include <string>
#include <torch/csrc/Dtype.h>
#include <vector>

#include "doing.h"
#include "exit_status.h"
#include "holder.h"
#include "kernels.h"
#include "python_marks.h"
#include "recorder.h"
#include "statuses.h"
#include "thread.h"
#include "wake.h"

namespace rankcall {
namespace {

PyObject* fail(const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

PyObject* py_ops(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const auto& handle : c10d_ops()) {
    PyObject* name = PyUnicode_FromString(handle.schema().name().substr(6).c_str());
    PyList_Append(names, name);
    Py_DECREF(name);
  }
  return names;
}

PyObject* py_create(PyObject*, PyObject* args) {
  Py_buffer buffer;
  Geometry geometry;
  PyObject *dtypes, *skip, *installed;
  int call_sites;
  int device_times;
  if (!PyArg_ParseTuple(args, "w*(KKKKKK)OOOpp", &buffer, &geometry.capacity, &geometry.inflight_capacity,
                        &geometry.tables_bytes, &geometry.inflight_offset, &geometry.tables_offset,
                        &geometry.records_offset, &dtypes, &skip, &installed, &call_sites, &device_times))
    return nullptr;
  auto* holder = new Holder;
  holder->buffer = buffer;
  holder->recorder = new Recorder(static_cast<char*>(buffer.buf), geometry);
  Recorder& recorder = *holder->recorder;
  recorder.call_sites = call_sites != 0 && RANKCALL_FRAMES;
  if (device_times) recorder.device_times.turn_on();
  for (Py_ssize_t i = 0; i < PySequence_Size(dtypes); i++) {
    PyObject* pair = PySequence_GetItem(dtypes, i);
    PyObject* dtype = PyTuple_GetItem(pair, 0);
    if (THPDtype_Check(dtype))
      recorder.dtypes[static_cast<uint8_t>(reinterpret_cast<THPDtype*>(dtype)->scalar_type)] =
          static_cast<uint8_t>(PyLong_AsLong(PyTuple_GetItem(pair, 1)));
    Py_DECREF(pair);
  }
  g_call_sites.reset(texts_of(skip), texts_of(installed),
                     [](void* context, const std::string& entry, const std::string& source, const char* api) {
                       auto* to = static_cast<Recorder*>(context);
                       const uint32_t id = to->ring.append(layout::kEntrySite, entry);
                       to->marks.add_site(id, source, api);
                       return id;
                     },
                     &recorder);
  return PyCapsule_New(holder, "rankcall.recorder", release_holder);
}

// Put the kernels in front of the ops. `codes`: the op code of each c10d op, by name.
PyObject* py_install(PyObject*, PyObject* codes) {
  try {
    if (g_op_count == 0) {
      for (const auto& handle : c10d_ops()) {
        Op& op = g_ops[g_op_count];
        op.name = handle.schema().name().substr(6);
        PyObject* code = PyDict_GetItemString(codes, op.name.c_str());
        op.code = code ? static_cast<uint8_t>(PyLong_AsLong(code)) : 0;
        describe(handle.schema(), op);
        g_op_count++;
      }
    }
    install();
  } catch (const std::exception& error) {
    return fail(error);
  }
  Py_RETURN_NONE;
}

// Record from now on; the kernels must be installed.
PyObject* py_start(PyObject*, PyObject* capsule) {
  Recorder& recorder = *holder_of(capsule)->recorder;
  try {
    for (size_t which = 0; which < g_op_count; which++)
      recorder.variants[which] = recorder.ring.append(layout::kEntryString, g_ops[which].name);
    recorder.run();
    g_active.store(&recorder, std::memory_order_release);
  } catch (const std::exception& error) {
    return fail(error);
  }
  Py_RETURN_NONE;
}

// Stop recording. Ops in flight still write their ends; drained() tells when the last has.
PyObject* py_stop(PyObject*, PyObject* capsule) {
  Recorder& recorder = *holder_of(capsule)->recorder;
  g_active.store(nullptr);
  Py_BEGIN_ALLOW_THREADS
  recorder.stop();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* py_drained(PyObject*, PyObject* capsule) {
  return PyBool_FromLong(holder_of(capsule)->recorder->ring.drained());
}

PyObject* py_append(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned int kind;
  const char* payload;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OIy#", &capsule, &kind, &payload, &size)) return nullptr;
  return PyLong_FromUnsignedLong(holder_of(capsule)->recorder->ring.append(kind, std::string(payload, size)));
}

// For tests: what a failed op's message gets.
PyObject* py_error(PyObject*, PyObject* args) {
  PyObject* capsule;
  const char* message;
  if (!PyArg_ParseTuple(args, "Os", &capsule, &message)) return nullptr;
  return PyLong_FromUnsignedLong(holder_of(capsule)->recorder->ring.error(message));
}

PyObject* py_add_group(PyObject*, PyObject* args) {
  PyObject* capsule;
  const char *name, *payload;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "Osy#", &capsule, &name, &payload, &size)) return nullptr;
  return PyLong_FromUnsignedLong(holder_of(capsule)->recorder->groups.announce(name, std::string(payload, size)));
}

PyObject* py_counts(PyObject*, PyObject* capsule) {
  const Ring& ring = holder_of(capsule)->recorder->ring;
  const uint64_t done = ring.done();
  return Py_BuildValue("KK", static_cast<unsigned long long>(ring.head()), static_cast<unsigned long long>(done));
}

PyObject* py_step(PyObject*, PyObject* capsule) {
  holder_of(capsule)->recorder->ring.field<uint64_t>(layout::kStep).fetch_add(1, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

// Note that the thread of hooks is about to sleep on `fd`: 1 wakes it at ends, 2 also at starts.
PyObject* py_sleep(PyObject*, PyObject* args) {
  int fd, mode;
  if (!PyArg_ParseTuple(args, "ii", &fd, &mode)) return nullptr;
  g_wake_fd.store(fd);
  g_sleeping.store(mode);
  Py_RETURN_NONE;
}

// Return a list of what `make` makes of each item; null, with an exception set, if it cannot make one.
template <class Item, class Make>
PyObject* list_of(const std::vector<Item>& items, Make make) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(items.size()));
  if (!list) return nullptr;
  for (size_t i = 0; i < items.size(); i++) {
    PyObject* made = make(items[i]);
    if (!made) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), made);
  }
  return list;
}

// Take the notes of ops on devices that were issued since the last call, as device_status.py's DeviceOp.
PyObject* py_take_device_ops(PyObject*, PyObject* capsule) {
  return list_of(holder_of(capsule)->recorder->device_ops.take(), [](const DeviceOp& op) {
    return Py_BuildValue("KILOKOKO", static_cast<unsigned long long>(op.index), op.group,
                         static_cast<long long>(op.number), op.p2p ? Py_True : Py_False,
                         static_cast<unsigned long long>(op.block), op.watched ? Py_True : Py_False,
                         static_cast<unsigned long long>(op.stream), op.in_stream ? Py_True : Py_False);
  });
}

// Take the indexes of the records that futures have ended since the last call.
PyObject* py_take_ended_device_ops(PyObject*, PyObject* capsule) {
  return list_of(holder_of(capsule)->recorder->device_ops.take_ended(),
                 [](uint64_t index) { return PyLong_FromUnsignedLongLong(index); });
}

// End records that have not ended: completed at `time_ns`, or abandoned if that is 0.
PyObject* py_end_device_ops(PyObject*, PyObject* args) {
  PyObject *capsule, *indexes;
  long long time_ns;
  if (!PyArg_ParseTuple(args, "OO!L", &capsule, &PyList_Type, &indexes, &time_ns)) return nullptr;
  Recorder& recorder = *holder_of(capsule)->recorder;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(indexes); i++) {
    const uint64_t index = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(indexes, i));
    if (PyErr_Occurred()) return nullptr;
    if (!recorder.device_ops.claim(index)) continue;
    if (time_ns) end_record(recorder, index, Outcome{layout::kCompleted, time_ns});
    else abandon(recorder, index, layout::kEnqueued);
  }
  Py_RETURN_NONE;
}

// Note what is known of the starts of some ops on devices: see Ring::start.
PyObject* py_start_device_ops(PyObject*, PyObject* args) {
  PyObject *capsule, *indexes;
  long long time_ns;
  if (!PyArg_ParseTuple(args, "OO!L", &capsule, &PyList_Type, &indexes, &time_ns)) return nullptr;
  Recorder& recorder = *holder_of(capsule)->recorder;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(indexes); i++) {
    const uint64_t index = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(indexes, i));
    if (PyErr_Occurred()) return nullptr;
    recorder.ring.start(index, time_ns);
  }
  Py_RETURN_NONE;
}

// Before and after a look at the back ends' status: see FirstOp. False if now is not the moment.
PyObject* py_reading_status(PyObject*, PyObject* begins) {
  const bool reading = PyObject_IsTrue(begins) == 1;
  g_reading_status.store(reading);
  if (!reading || g_first_ops.load() == 0) return PyBool_FromLong(reading);
  g_reading_status.store(false);
  Py_RETURN_FALSE;
}

PyObject* py_device_time_failures(PyObject*, PyObject* capsule) {
  return PyLong_FromUnsignedLongLong(holder_of(capsule)->recorder->device_times.failures());
}

// What a thread is doing; how long the process was stopped, and its training thread in states D and S.
PyObject* py_look(PyObject*, PyObject* args) {
  PyObject *capsule, *current_frames;
  unsigned long thread;
  if (!PyArg_ParseTuple(args, "OOk", &capsule, &current_frames, &thread)) return nullptr;
  const Pulse& pulse = holder_of(capsule)->recorder->pulse;
  const int doing = thread ? doing_of(current_frames, thread) : kUnknownDoing;
  return Py_BuildValue("iLLL", doing, static_cast<long long>(pulse.stopped_ns()),
                       static_cast<long long>(pulse.blocked_ns()), static_cast<long long>(pulse.sleeping_ns()));
}

PyObject* py_find_call_site(PyObject*, PyObject* moment) {
  // For tests: what the walk finds here and now.
  CallSites::Found found;
  const uint64_t value = PyLong_AsUnsignedLongLong(moment);
  Py_BEGIN_ALLOW_THREADS
  found = g_call_sites.find(value);
  Py_END_ALLOW_THREADS
  return PyLong_FromUnsignedLong(found.site);
}

void in_forked_child() {
  g_forks.fetch_add(1);
  g_active.store(nullptr);
  g_sleeping.store(0);
  Spans::current().store(nullptr);
  this_thread().id = 0;
}

PyObject* py_note_exit_status(PyObject*, PyObject* args) {
  const char *folder, *path, *fields;
  if (!PyArg_ParseTuple(args, "yys", &folder, &path, &fields)) return nullptr;
  return PyBool_FromLong(note_exit_status(folder, path, fields));
}

PyMethodDef g_methods[] = {
    {"ops", py_ops, METH_NOARGS, "Names of the c10d ops that can be recorded."},
    {"create", py_create, METH_VARARGS, "Make a recorder over a writable ring buffer."},
    {"install", py_install, METH_O, "Put the kernels in front of the ops, for good."},
    {"start", py_start, METH_O, "Record from now on."},
    {"stop", py_stop, METH_O, "Record no new ops; those in flight still finish."},
    {"drained", py_drained, METH_O, "Whether a stopped recorder's last op has finished."},
    {"append", py_append, METH_VARARGS, "Add a side-table entry; returns its id or 0."},
    {"error", py_error, METH_VARARGS, "The id of an error message, or 0."},
    {"add_group", py_add_group, METH_VARARGS, "Announce a process group by name."},
    {"marks", py_marks, METH_VARARGS, "Call a tool at the issue of each op."},
    {"marks_off", py_marks_off, METH_O, "Call the tool no more."},
    {"group_text", py_group_text, METH_VARARGS, "The text of a group for marks."},
    {"group_span", py_group_span, METH_VARARGS, "Which members of a group are on other hosts."},
    {"counts", py_counts, METH_O, "Records issued and finished."},
    {"step", py_step, METH_O, "Count an optimizer step."},
    {"take_device_ops", py_take_device_ops, METH_O, "Ops on devices that were issued since the last call."},
    {"device_time_failures", py_device_time_failures, METH_O, "How often an event of a device failed."},
    {"start_device_ops", py_start_device_ops, METH_VARARGS, "Note which ops devices have started."},
    {"take_ended_device_ops", py_take_ended_device_ops, METH_O, "Records that futures have ended since the last call."},
    {"end_device_ops", py_end_device_ops, METH_VARARGS, "End records of ops on devices."},
    {"reading_status", py_reading_status, METH_O, "Say that the back ends' status is being read."},
    {"note_exit_status", py_note_exit_status, METH_VARARGS, "Note the exit status in a file if it is not 0."},
    {"sleep", py_sleep, METH_VARARGS, "Arm the wake-up of the thread of hooks."},
    {"statuses", make_statuses, METH_VARARGS, "The statuses that hooks get of a batch of events."},
    {"look", py_look, METH_VARARGS, "What a thread is doing, and what was seen of the process."},
    {"find_call_site", py_find_call_site, METH_O, "The call-site id of the caller."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "rankcall_recorder", nullptr, -1, g_methods,
                        nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace rankcall

PyMODINIT_FUNC PyInit_rankcall_recorder() {
  pthread_atfork(nullptr, nullptr, rankcall::in_forked_child);
  PyObject* module = PyModule_Create(&rankcall::g_module);
  if (module) PyModule_AddIntConstant(module, "CALL_SITES", RANKCALL_FRAMES);
  return module;
}
