// The Python module. One unit of all: torch's headers take far longer to compile than these.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "agent.cpp"
#include "messages.cpp"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace rankcall;
  using Free = py::call_guard<py::gil_scoped_release>;
  py::module::import("torch._C._distributed_rpc");

  py::class_<ZmqAgent, rpc::RpcAgent, std::shared_ptr<ZmqAgent>>(module, "ZmqAgent")
      .def(py::init([](const std::string& name, int64_t id, float timeout_s,
                       const std::string& library, uint64_t session, std::size_t threads,
                       int64_t max_bytes, int heartbeat_timeout_ms) {
        return std::make_shared<ZmqAgent>(
            name, id, timeout_s,
            Settings{library, session, threads, max_bytes, heartbeat_timeout_ms});
      }))
      .def("bind_local", &ZmqAgent::bind_local, Free())
      .def("bind_network",
           [](ZmqAgent& agent, const std::string& endpoint, std::string server_public,
              std::string server_secret, std::string client_public, std::string client_secret) {
             return agent.bind_network(
                 endpoint, {server_public, server_secret, client_public, client_secret});
           })
      .def("open_slabs", &ZmqAgent::open_slabs)
      .def("add_peer",
           [](ZmqAgent& agent, const std::string& name, int64_t id, uint64_t session,
              const std::string& endpoint, const std::string& slabs, int pid, int64_t max_bytes) {
             agent.add_peer(
                 std::make_shared<Peer>(name, id, session, endpoint, slabs, pid, max_bytes));
           },
           Free())
      .def("remove_peer", &ZmqAgent::remove_peer, Free())
      .def("set_devices", &ZmqAgent::set_devices, Free())
      .def("on_join", &ZmqAgent::on_join)
      .def("on_control", &ZmqAgent::on_control)
      .def("on_lost", &ZmqAgent::on_lost)
      .def("on_close", &ZmqAgent::on_close)
      .def("control",
           [](ZmqAgent& agent, const std::string& to, const std::string& payload,
              float timeout_s) {
             return std::make_shared<torch::jit::PythonFutureWrapper>(
                 agent.control(to, payload, timeout_s));
           },
           Free())
      .def("gone", &ZmqAgent::gone, Free())
      .def("counts", &ZmqAgent::counts)
      .def("join", &ZmqAgent::join, py::arg("shutdown") = false, py::arg("timeout") = 0, Free())
      .def("get_worker_info", [](const ZmqAgent& agent) {
             return agent.getWorkerInfo();
           }, Free())
      .def("get_worker_info", [](const ZmqAgent& agent, const std::string& name) {
             return agent.getWorkerInfo(name);
           }, Free())
      .def("get_worker_info", [](const ZmqAgent& agent, rpc::worker_id_t id) {
             return agent.getWorkerInfo(id);
           }, Free());

  // For the tests: decodes ZeroMQ messages without a socket. Each message is a
  // list of frames; the result has the kind, call, payload and parts of each message that is whole.
  module.def("decode", [](const std::vector<std::vector<std::string>>& messages, uint64_t max_bytes,
                          bool is_known) {
    Assembler assembler(max_bytes);
    py::list decoded;
    auto add = [&](const Incoming& whole) {
      py::list parts;
      for (const Bytes& part : whole.parts) parts.append(py::bytes(part.data, part.size));
      const Header& header = whole.parsed.header;
      decoded.append(py::make_tuple(int(header.kind), header.call,
                                    py::bytes(whole.parsed.payload, header.payload_bytes), parts));
    };
    try {
      for (const auto& frames : messages) {
        auto chunk = parse_chunk(frames.at(0).data(), frames.at(0).size());
        if (chunk && frames.size() == 2) {
          auto whole = assembler.add(*chunk, frames[1].data(), frames[1].size(), is_known);
          if (whole) add(*whole);
          continue;
        }
        std::vector<Bytes> parts;
        for (std::size_t i = 1; i < frames.size(); i++)
          parts.push_back({frames[i].data(), frames[i].size(), nullptr});
        add(parse_message({frames[0].data(), frames[0].size(), nullptr}, std::move(parts)));
      }
    } catch (const WireError& error) {
      throw py::value_error(error.what());
    }
    return decoded;
  });
}
