// The Python module. One unit of all: torch's headers take far longer to compile than these.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "agent.cpp"
#include "receive.cpp"
#include "send.cpp"
#include "watch.cpp"

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
      .def("bind_network", &ZmqAgent::bind_network, Free())
      .def("use_keys",
           [](ZmqAgent& agent, std::string server_public, std::string server_secret,
              std::string client_public, std::string client_secret) {
             agent.use_keys({server_public, server_secret, client_public, client_secret});
           })
      .def("open_arena", &ZmqAgent::open_arena)
      .def("add_peer",
           [](ZmqAgent& agent, const std::string& name, int64_t id, uint64_t session,
              const std::string& endpoint, const std::string& arena, int pid, int64_t max_bytes) {
             auto peer = std::make_shared<Peer>(name, id, session, arena, pid, max_bytes);
             agent.add_peer(std::move(peer), endpoint);
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

  // For the tests: what the wire's parser makes of frames, without a socket.
  module.def("parse", [](const std::vector<std::string>& frames) {
    std::vector<std::size_t> sizes;
    for (std::size_t i = 1; i < frames.size(); i++) sizes.push_back(frames[i].size());
    try {
      auto parsed = parse(frames.at(0).data(), frames.at(0).size(), sizes);
      return py::make_tuple(int(parsed.header.kind), parsed.header.call,
                            py::bytes(parsed.payload, parsed.header.payload_bytes),
                            parsed.slots.size());
    } catch (const WireError& error) {
      throw py::value_error(error.what());
    }
  });
}
