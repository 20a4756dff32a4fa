// Python's side of marks.h: the tool's functions, and the texts of groups.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string>
#include <vector>

#include "holder.h"
#include "marks.h"

namespace rankcall {
namespace {

// The texts of a list, without those that are not UTF-8: a folder may have any name.
std::vector<std::string> texts_of(PyObject* list) {
  std::vector<std::string> texts;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    const char* text = PyUnicode_AsUTF8(PyList_GET_ITEM(list, i));
    if (text) texts.emplace_back(text);
    else PyErr_Clear();
  }
  return texts;
}

// Call a tool at the issue of each op: C functions at these addresses.
PyObject* py_marks(PyObject*, PyObject* args) {
  PyObject *capsule, *dtypes, *variants, *names, *calls;
  unsigned long long mark, begin, end;
  const char *gpu_serial, *vm_id, *batch;
  int pickles, across_only;
  if (!PyArg_ParseTuple(args, "O(KKK)ssO!O!O!O!sip", &capsule, &mark, &begin, &end, &gpu_serial, &vm_id, &PyList_Type,
                        &dtypes, &PyList_Type, &variants, &PyList_Type, &names, &PyList_Type, &calls, &batch, &pickles,
                        &across_only))
    return nullptr;
  Marks::Functions functions;
  functions.mark = reinterpret_cast<decltype(functions.mark)>(mark);
  functions.begin = reinterpret_cast<decltype(functions.begin)>(begin);
  functions.end = reinterpret_cast<decltype(functions.end)>(end);
  Marks::Settings settings;
  settings.gpu_serial = gpu_serial;
  settings.vm_id = vm_id;
  settings.dtypes = texts_of(dtypes);
  const auto ops = texts_of(variants), called = texts_of(names);
  for (size_t i = 0; i < ops.size() && i < called.size(); i++) settings.names[ops[i]] = called[i];
  for (const auto& call : texts_of(calls)) settings.object_calls.insert(call);
  settings.batch = batch;
  settings.pickles = static_cast<uint8_t>(pickles);
  settings.across_only = across_only != 0;
  holder_of(capsule)->recorder->marks.turn_on(functions, std::move(settings));
  Py_RETURN_NONE;
}

PyObject* py_marks_off(PyObject*, PyObject* capsule) {
  holder_of(capsule)->recorder->marks.turn_off();
  Py_RETURN_NONE;
}

// The text of a group for marks: JSON of its label and ranks, the ranks, and this rank's place.
PyObject* py_group_text(PyObject*, PyObject* args) {
  PyObject *capsule, *ranks;
  unsigned int id;
  const char *label, *text;
  Marks::GroupText group;
  if (!PyArg_ParseTuple(args, "OIssO!i", &capsule, &id, &label, &text, &PyList_Type, &ranks, &group.me)) return nullptr;
  group.label = label;
  group.ranks_text = text;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ranks); i++)
    group.ranks.push_back(static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(ranks, i))));
  holder_of(capsule)->recorder->marks.add_group(id, std::move(group));
  Py_RETURN_NONE;
}

// Whether a group crosses hosts, and a byte a member: whether it is on another.
PyObject* py_group_span(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned int id;
  int crosses;
  const char* elsewhere;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OIpy#", &capsule, &id, &crosses, &elsewhere, &size)) return nullptr;
  holder_of(capsule)->recorder->marks.set_span(id, crosses != 0, std::string(elsewhere, static_cast<size_t>(size)));
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace rankcall
