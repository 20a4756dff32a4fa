// Record that an op is issued: read its arguments, find its call site, write its record.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "completion.h"
#include "recorder.h"
#include "thread.h"

namespace rankcall {
namespace {

void fill_shape(Recorder& recorder, Record& record, const c10::IValue* tensors, const Op& op, const c10::IValue* arguments,
                const Sizes& sizes) {
  record.tensors = static_cast<uint16_t>(std::min<uint32_t>(sizes.tensors, UINT16_MAX));
  if (sizes.first && !sizes.first->is_sparse()) {
    const auto dims = sizes.first->unsafeGetTensorImpl()->sizes();
    record.ndim = static_cast<uint8_t>(std::min<size_t>(dims.size(), layout::kMaxDims));
    for (size_t i = 0; i < record.ndim; i++) record.shape[i] = dims[i];
  }
  const bool splits = op.in_splits >= 0 && (!arguments[op.in_splits].toListRef().empty() ||
                                            !arguments[op.out_splits].toListRef().empty());
  if (sizes.tensors < 2 && !splits) return;
  Hash hash;
  each_tensor(*tensors, [&](const at::Tensor& tensor) {
    const auto dims = tensor.sizes();
    hash.add(static_cast<int64_t>(dims.size()));
    for (int64_t dim : dims) hash.add(dim);
  });
  if (splits) {
    for (const int list : {op.out_splits, op.in_splits}) {
      hash.add(-1);
      for (const c10::IValue& split : arguments[list].toListRef()) hash.add(split.toInt());
    }
  }
  record.shape_hash = hash.folded();
  if (op.coalesced) recorder.note_shapes(record.shape_hash, *tensors);
}

c10::intrusive_ptr<c10d::Backend> back_end_of(c10d::ProcessGroup& group, c10::Device device) noexcept {
  try {
    return group.getBackend(device.type());
  } catch (...) {  // it has none for this device, so the op is about to fail
    return nullptr;
  }
}

// Note the caller's stream, and whether it is being captured into a graph.
void note_stream(c10::Device device, Issued& issued) noexcept {
  try {
    issued.stream = stream_to_time(device);
    issued.captured = !issued.stream && c10::impl::hasDeviceGuardImpl(device.type());
  } catch (...) {
  }
}

// Read the arguments.
void read_arguments(Recorder& recorder, const Op& op, const c10::IValue* arguments, Record& record, Issued& issued,
                    c10::Device& device) {
  const auto at = [&](int position) { return position >= 0 ? &arguments[position] : nullptr; };
  const c10::IValue* in_value = at(op.input >= 0 ? op.input : op.code == layout::kRecv ? -1 : op.in_place);
  const c10::IValue* out_value = at(op.output >= 0 ? op.output : op.code == layout::kSend ? -1 : op.in_place);
  const Sizes in = sizes_of(in_value);
  const Sizes out = out_value == in_value ? in : sizes_of(out_value);
  const Sizes other = sizes_of(at(op.other_tensor));
  const Sizes& main = in.first ? in : out.first ? out : other;

  if (main.first) {
    device = main.first->device();
    record.dtype = recorder.dtypes[static_cast<uint8_t>(main.first->scalar_type())];
  }
  auto* process_group = held<c10d::ProcessGroup>(arguments[op.process_group]);
  Group* group = recorder.groups.find(process_group);
  if (group->on_host && device.is_cpu()) group = group->on_host.get();
  issued.group = record.group = group->id;
  issued.first = group->is_first();
  record.in_bytes = in.bytes;
  record.out_bytes = out.bytes;
  record.message_bytes = message_bytes(op, arguments, in, out, group->rank, group->size);
  if (&main != &other) fill_shape(recorder, record, in.first ? in_value : out_value, op, arguments, main);
  record.device_type = static_cast<uint8_t>(device.type());
  record.device_index = device.index();
  record.root = op.root >= 0 ? static_cast<int32_t>(arguments[op.root].toInt()) : -1;
  record.tag = op.tag >= 0 ? arguments[op.tag].toInt() : 0;
  record.peer = -1;
  record.async_op = op.async_op >= 0 ? arguments[op.async_op].toBool() : 2;
  if (op.reduce_op >= 0) {
    const auto* reduce = held<c10d::ReduceOp>(arguments[op.reduce_op]);
    const int code = static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(*reduce)) + 1;
    record.reduce_op = static_cast<uint8_t>(code < static_cast<int>(layout::kReduceOps) ? code : 0);
  }
  if (op.p2p) {
    record.kind = layout::kP2p;
    const bool outgoing = op.dst >= 0;
    const int peer_at = outgoing ? op.dst : op.src;
    if (peer_at >= 0) {
      record.peer = static_cast<int32_t>(arguments[peer_at].toInt());
      record.seq = group->next_p2p(record.peer, record.tag, outgoing);
    } else {
      issued.receiver = recorder.groups.shared(process_group, device.is_cpu());
      issued.tag = record.tag;
      record.flags |= layout::kFlagAnySource;
    }
  } else {
    record.seq = group->collectives.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  issued.p2p = op.p2p;
  if (!device.is_cpu() && !group->ends_on_host(*process_group, device)) {
    issued.on_device = true;
    note_stream(device, issued);
    issued.is_synchronous = record.async_op == 0;
    if (!op.p2p) issued.back_end = back_end_of(*process_group, device);
  }
}

void fill_call_site(Recorder& recorder, Record& record, uint64_t index) {
  uint64_t& correlation = this_thread().correlation;
  CallSites::Found found;
  if (recorder.call_sites) found = g_call_sites.find(record.step);
  if (!found.continues) correlation = index + 1;
  record.call_site = found.site;
  record.correlation = correlation;
}

void write_record(Recorder& recorder, const Op& op, Record& record, Issued& issued) {
  fill_call_site(recorder, record, issued.index);
  issued.block = record.correlation;
  if (issued.on_device) record.flags |= layout::kFlagDevice;
  record.status = issued.on_device ? layout::kEnqueued : layout::kStarted;
  record.enqueued_ns = now_ns();
  if (!issued.on_device) record.started_ns = record.enqueued_ns;
  if (issued.stream) issued.span = recorder.device_times.begin(*issued.stream, issued.index, record.enqueued_ns);
  if (Record* slot = recorder.ring.begin(issued.index)) {
    constexpr size_t kBody = offsetof(Record, seq);
    std::memcpy(reinterpret_cast<char*>(slot) + kBody, reinterpret_cast<char*>(&record) + kBody,
                sizeof(Record) - kBody);
    recorder.ring.publish(slot, issued.index);
    wake(2);
  }
  if (recorder.marks.on()) {
    const int32_t rank = recorder.ring.field<int32_t>(layout::kRank).load(std::memory_order_relaxed);
    recorder.marks.issued(record, issued.index, op.name, rank);
  }
}

// Record that an op is issued. False if it is not to be recorded, or recording is off.
bool begin(size_t which, const torch::jit::Stack& stack, Issued& issued) noexcept {
  Recorder* recorder = g_active.load(std::memory_order_acquire);
  // The index comes first. Another thread may end the recording at any moment, and a ring that awaits
  // no more ends is unmapped; an index that was taken keeps it mapped until the op has ended.
  if (!recorder || !recorder->ring.reserve(issued.index)) return false;
  issued.recorder = recorder;
  try {
    const Op& op = g_ops[which];
    const c10::IValue* arguments = &*(stack.end() - static_cast<std::ptrdiff_t>(op.arguments));
    Record record{};
    c10::Device device(c10::kCPU);
    read_arguments(*recorder, op, arguments, record, issued, device);
    record.op = op.code;
    record.variant = recorder->variants[which];
    record.thread = this_thread().thread_id();
    record.step = recorder->ring.field<uint64_t>(layout::kStep).load(std::memory_order_relaxed);
    record.device_ms = std::nan("");
    write_record(*recorder, op, record, issued);
    return true;
  } catch (...) {  // an unforeseen argument: the user's op goes on without a record
    abandon(*recorder, issued.index);
    return false;
  }
}

}  // namespace
}  // namespace rankcall
