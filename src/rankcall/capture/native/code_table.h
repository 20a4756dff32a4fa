// Code objects, and the lines in them that issued ops.
//
// Written with the GIL, read without a lock. No code object is kept alive: the callback of a weak
// reference removes its entry just before it is freed. A reader only looks up code objects of
// running frames, so no entry that it finds can be freed while it reads it.
#pragma once

#include <Python.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace rankcall {

// Spread keys whose low bits are alike, such as addresses, over the top `bits` bits. The factor is 2^64
// divided by the golden ratio (Fibonacci hashing).
inline size_t spread(uint64_t key, int bits) { return static_cast<size_t>(key * 0x9E3779B97F4A7C15ull >> (64 - bits)); }

// The lines of one code object, by instruction and public call: open addressing, never more than
// half full, and only added to. A value is one word, so that it can be replaced while it is read.
class LineTable {
 public:
  explicit LineTable(int bits) : bits_(bits), slots_(new Slot[size_t{1} << bits]) {}

  const std::atomic<uint64_t>* find(uint64_t key) const {
    for (size_t at = spread(key, bits_);; at++) {
      const Slot& slot = slots_[at & mask()];
      const uint64_t there = slot.key.load(std::memory_order_acquire);
      if (there == key) return &slot.value;
      if (!there) return nullptr;
    }
  }
  // Add a key that is not there yet.
  void add(uint64_t key, uint64_t value) {
    size_t at = spread(key, bits_);
    while (slots_[at & mask()].key.load(std::memory_order_relaxed)) at++;
    slots_[at & mask()].value.store(value, std::memory_order_relaxed);
    slots_[at & mask()].key.store(key, std::memory_order_release);
    used_++;
  }
  bool full() const { return 2 * used_ > mask(); }
  std::unique_ptr<LineTable> grown() const {
    auto larger = std::make_unique<LineTable>(bits_ + 1);
    for (size_t at = 0; at <= mask(); at++)
      if (const uint64_t key = slots_[at].key.load(std::memory_order_relaxed))
        larger->add(key, slots_[at].value.load(std::memory_order_relaxed));
    return larger;
  }
  size_t used() const { return used_; }

 private:
  struct Slot {
    std::atomic<uint64_t> key{0};  // 0: free
    std::atomic<uint64_t> value{0};
  };
  size_t mask() const { return (size_t{1} << bits_) - 1; }

  int bits_;
  size_t used_ = 0;
  std::unique_ptr<Slot[]> slots_;
};

// One code object that is alive. Most issue ops from one line, which is kept right here: with many
// call sites in use, a look-up costs what it misses in the processor's caches.
struct alignas(64) Code {
  PyCodeObject* object;
  uint32_t serial;  // never the same one twice: an address is used again, and this is not
  uint8_t kind;
  std::atomic<uint64_t> first_key{0}, first_value{0};
  std::atomic<const LineTable*> lines{nullptr};
  // The last one is in use. Another thread may still read the others, so they stay as long as this.
  std::vector<std::unique_ptr<LineTable>> tables;

  Code(PyCodeObject* object, uint32_t serial, uint8_t kind) : object(object), serial(serial), kind(kind) {}

  const std::atomic<uint64_t>* line(uint64_t key) const {
    if (first_key.load(std::memory_order_acquire) == key) return &first_value;
    const LineTable* table = lines.load(std::memory_order_acquire);
    return table ? table->find(key) : nullptr;
  }
};

// Code objects by address: open addressing with short probes. Never destroyed: other threads may
// look something up while the process ends.
class CodeTable {
 public:
  static constexpr size_t kMaxCodes = 1 << 16, kMaxLines = 1 << 16;
  static constexpr uint32_t kNoSerial = 1;  // of a code object that is not there; serials are larger

  // The entry of a code object of a running frame; null if it has none.
  Code* find(PyCodeObject* code) const {
    const Table* table = table_.load(std::memory_order_acquire);
    if (!table) return nullptr;
    for (size_t at = table->start(code), probe = 0; probe < kProbes; at++, probe++) {
      const Slot& slot = table->slots[at & table->mask()];
      PyCodeObject* there = slot.object.load(std::memory_order_acquire);
      if (there == code) return slot.code.load(std::memory_order_relaxed);
      if (!there) return nullptr;
    }
    return nullptr;
  }

  // The rest is called with the GIL, and with the garbage collector off.

  // Remember a code object. Null if that is not possible; it is then met as a new one each time.
  Code* add(PyCodeObject* object, uint8_t kind) {
    if (Code* known = find(object)) return known;  // another thread was faster
    if (references_.size() >= kMaxCodes || last_serial_ == UINT32_MAX || !ready()) return nullptr;
    Slot* slot = free_slot(object);
    if (!slot) return nullptr;
    PyObject* reference = PyWeakref_NewRef(reinterpret_cast<PyObject*>(object), callback_);
    if (!reference) {
      PyErr_Clear();
      return nullptr;
    }
    Code* code = new Code(object, ++last_serial_, kind);
    references_.emplace(reference, code);
    place(*slot, code);
    return code;
  }

  // Remember a line, or replace its value. Does nothing once kMaxLines are there.
  void remember(Code& code, uint64_t key, uint64_t value) {
    if (const auto* known = code.line(key)) {
      const_cast<std::atomic<uint64_t>*>(known)->store(value, std::memory_order_release);
      return;
    }
    if (lines_ >= kMaxLines) return;
    lines_++;
    if (!code.first_key.load(std::memory_order_relaxed)) {
      code.first_value.store(value, std::memory_order_relaxed);
      code.first_key.store(key, std::memory_order_release);
      return;
    }
    LineTable* table = code.tables.empty() ? nullptr : code.tables.back().get();
    if (!table || table->full()) {
      code.tables.push_back(table ? table->grown() : std::make_unique<LineTable>(3));
      table = code.tables.back().get();
      code.lines.store(table, std::memory_order_release);
    }
    table->add(key, value);
  }

  size_t size() const { return references_.size(); }

 private:
  // The longest look-up, also in a table with many removed entries. A table is at most a quarter full, so
  // a row of 32 is rare; the table then grows.
  static constexpr size_t kProbes = 32;
  static constexpr int kFirstBits = 10, kMostBits = 18;

  struct Slot {
    std::atomic<PyCodeObject*> object{nullptr};  // null: free; removed(): free, and others lie behind it
    std::atomic<Code*> code{nullptr};
  };
  struct Table {
    explicit Table(int bits) : bits(bits), slots(new Slot[size_t{1} << bits]) {}
    size_t start(const PyCodeObject* object) const { return spread(reinterpret_cast<uintptr_t>(object), bits); }
    size_t mask() const { return (size_t{1} << bits) - 1; }
    int bits;
    Slot* slots;
  };
  static PyCodeObject* removed() { return reinterpret_cast<PyCodeObject*>(1); }

  static void place(Slot& slot, Code* code) {
    slot.code.store(code, std::memory_order_relaxed);
    slot.object.store(code->object, std::memory_order_release);
  }

  bool ready() {
    if (callback_) return true;
    static PyMethodDef method = {"rankcall_code_freed", code_freed, METH_O, nullptr};
    PyObject* self = PyCapsule_New(this, nullptr, nullptr);
    callback_ = self ? PyCFunction_New(&method, self) : nullptr;
    Py_XDECREF(self);
    if (callback_) table_.store(new Table(kFirstBits), std::memory_order_release);
    else PyErr_Clear();
    return callback_ != nullptr;
  }

  static Slot* slot_in(const Table& table, const PyCodeObject* object) {
    for (size_t at = table.start(object), probe = 0; probe < kProbes; at++, probe++) {
      Slot& slot = table.slots[at & table.mask()];
      PyCodeObject* there = slot.object.load(std::memory_order_relaxed);
      if (!there || there == removed()) return &slot;
    }
    return nullptr;
  }

  // A free slot for a code object. The table grows to four times its size when it is a quarter full,
  // or if no slot near is free. A reader may still be in the old one, so that is kept: all old ones
  // together are a third of the new one.
  Slot* free_slot(PyCodeObject* object) {
    const Table* table = table_.load(std::memory_order_relaxed);
    Slot* slot = 4 * references_.size() <= table->mask() ? slot_in(*table, object) : nullptr;
    if (slot || table->bits == kMostBits) return slot ? slot : slot_in(*table, object);
    auto larger = std::make_unique<Table>(table->bits + 2);
    for (const auto& [reference, code] : references_) {
      Slot* moved = slot_in(*larger, code->object);
      if (!moved) {
        delete[] larger->slots;
        return nullptr;
      }
      place(*moved, code);
    }
    slot = slot_in(*larger, object);
    table_.store(larger.release(), std::memory_order_release);
    return slot;
  }

  static PyObject* code_freed(PyObject* self, PyObject* reference) {
    static_cast<CodeTable*>(PyCapsule_GetPointer(self, nullptr))->forget(reference);
    Py_RETURN_NONE;
  }

  // Called before a code object's memory can be used again; no frame runs it any more.
  void forget(PyObject* reference) {
    const auto known = references_.find(reference);
    if (known == references_.end()) return;
    Code* code = known->second;
    references_.erase(known);
    if (code->first_key.load(std::memory_order_relaxed)) lines_--;
    if (!code->tables.empty()) lines_ -= code->tables.back()->used();
    remove(code->object);
    delete code;
    Py_DECREF(reference);
  }

  void remove(const PyCodeObject* object) {
    const Table& table = *table_.load(std::memory_order_relaxed);
    for (size_t at = table.start(object), probe = 0; probe < kProbes; at++, probe++) {
      Slot& slot = table.slots[at & table.mask()];
      if (slot.object.load(std::memory_order_relaxed) != object) continue;
      slot.object.store(removed(), std::memory_order_relaxed);
      // Nothing lies behind the last of a row, so it and the removed ones before it are free.
      if (table.slots[(at + 1) & table.mask()].object.load(std::memory_order_relaxed)) return;
      for (; table.slots[at & table.mask()].object.load(std::memory_order_relaxed) == removed(); at--)
        table.slots[at & table.mask()].object.store(nullptr, std::memory_order_relaxed);
      return;
    }
  }

  std::atomic<const Table*> table_{nullptr};
  std::unordered_map<PyObject*, Code*>& references_ = *new std::unordered_map<PyObject*, Code*>;
  PyObject* callback_ = nullptr;
  uint32_t last_serial_ = kNoSerial;
  size_t lines_ = 0;
};

}  // namespace rankcall
