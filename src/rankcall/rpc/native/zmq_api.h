// libzmq's C functions, found at run time in the library that pyzmq ships: no headers, no linking.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace rankcall {

// Layouts and numbers of libzmq's stable ABI (4.x).
struct alignas(void*) ZmqMessage {
  unsigned char opaque[64];
};

struct ZmqPollItem {
  void* socket;
  int fd;
  short events;
  short revents;
};

enum ZmqSocketType { kPair = 0, kRep = 4, kDealer = 5, kRouter = 6 };
enum ZmqFlag { kDontWait = 1, kSendMore = 2 };
constexpr short kPollIn = 1;

enum ZmqOption {
  kEvents = 15,
  kLinger = 17,
  kReconnectIvl = 18,
  kReconnectIvlMax = 21,
  kMaxMsgSize = 22,
  kSndHwm = 23,
  kRcvHwm = 24,
  kLastEndpoint = 32,
  kRouterMandatory = 33,
  kIpv6 = 42,
  kPlainUsername = 45,
  kCurveServer = 47,
  kCurvePublicKey = 48,
  kCurveSecretKey = 49,
  kCurveServerKey = 50,
  kZapDomain = 55,
  kConnectRoutingId = 61,
  kHandshakeIvl = 66,
  kHeartbeatIvl = 75,
  kHeartbeatTimeout = 77,
};
enum ZmqContextOption { kMaxSockets = 2 };

enum ZmqEvent {
  kAccepted = 0x0020,
  kDisconnected = 0x0200,
  kFailedNoDetail = 0x0800,
  kHandshakeSucceeded = 0x1000,
  kFailedProtocol = 0x2000,
  kFailedAuth = 0x4000,
};
constexpr int kHandshakeFailed = kFailedNoDetail | kFailedProtocol | kFailedAuth;
constexpr int kEterm = 156384765;

struct Zmq {
  void* (*ctx_new)();
  int (*ctx_set)(void*, int, int);
  int (*ctx_shutdown)(void*);
  int (*ctx_term)(void*);
  void* (*socket)(void*, int);
  int (*close)(void*);
  int (*setsockopt)(void*, int, const void*, std::size_t);
  int (*getsockopt)(void*, int, void*, std::size_t*);
  int (*bind)(void*, const char*);
  int (*connect)(void*, const char*);
  int (*disconnect)(void*, const char*);
  int (*msg_init)(ZmqMessage*);
  int (*msg_init_size)(ZmqMessage*, std::size_t);
  int (*msg_init_data)(ZmqMessage*, void*, std::size_t, void (*)(void*, void*), void*);
  int (*msg_send)(ZmqMessage*, void*, int);
  int (*msg_recv)(ZmqMessage*, void*, int);
  int (*msg_close)(ZmqMessage*);
  void* (*msg_data)(ZmqMessage*);
  std::size_t (*msg_size)(const ZmqMessage*);
  int (*msg_more)(const ZmqMessage*);
  int (*poll)(ZmqPollItem*, int, long);
  int (*socket_monitor)(void*, const char*, int);
  int (*zmq_errno)();
  const char* (*strerror)(int);

  // `library` is any shared object that brings libzmq in: dlsym looks through what it links to.
  explicit Zmq(const std::string& library) {
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(std::string("libzmq cannot be loaded: ") + dlerror());
    find(handle, ctx_new, "zmq_ctx_new");
    find(handle, ctx_set, "zmq_ctx_set");
    find(handle, ctx_shutdown, "zmq_ctx_shutdown");
    find(handle, ctx_term, "zmq_ctx_term");
    find(handle, socket, "zmq_socket");
    find(handle, close, "zmq_close");
    find(handle, setsockopt, "zmq_setsockopt");
    find(handle, getsockopt, "zmq_getsockopt");
    find(handle, bind, "zmq_bind");
    find(handle, connect, "zmq_connect");
    find(handle, disconnect, "zmq_disconnect");
    find(handle, msg_init, "zmq_msg_init");
    find(handle, msg_init_size, "zmq_msg_init_size");
    find(handle, msg_init_data, "zmq_msg_init_data");
    find(handle, msg_send, "zmq_msg_send");
    find(handle, msg_recv, "zmq_msg_recv");
    find(handle, msg_close, "zmq_msg_close");
    find(handle, msg_data, "zmq_msg_data");
    find(handle, msg_size, "zmq_msg_size");
    find(handle, msg_more, "zmq_msg_more");
    find(handle, poll, "zmq_poll");
    find(handle, socket_monitor, "zmq_socket_monitor");
    find(handle, zmq_errno, "zmq_errno");
    find(handle, strerror, "zmq_strerror");
  }

  void close_at_once(void*& open) const {
    if (!open) return;
    set(open, kLinger, 0);
    close(open);
    open = nullptr;
  }

  std::string error() const { return strerror(zmq_errno()); }

  void set(void* socket, int option, int value) const {
    setsockopt(socket, option, &value, sizeof value);
  }

  void set(void* socket, int option, int64_t value) const {
    setsockopt(socket, option, &value, sizeof value);
  }

  void set(void* socket, int option, const std::string& value) const {
    if (setsockopt(socket, option, value.data(), value.size()) != 0)
      throw std::runtime_error("a socket option was refused: " + error());
  }

 private:
  template <typename Function>
  static void find(void* handle, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (!function) throw std::runtime_error(std::string("this pyzmq brings no ") + name);
  }
};

// The functions, found once and never unloaded: a tensor may lie in a frame longer than its agent.
inline const Zmq& load_zmq(const std::string& library) {
  static const Zmq* functions = new Zmq(library);
  return *functions;
}

// One received frame, closed with its last owner.
class Frame {
 public:
  explicit Frame(const Zmq& zmq) : zmq_(&zmq) { zmq_->msg_init(&message_); }
  ~Frame() { zmq_->msg_close(&message_); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  ZmqMessage* get() { return &message_; }
  char* data() { return static_cast<char*>(zmq_->msg_data(&message_)); }
  std::size_t size() const { return zmq_->msg_size(&message_); }
  bool more() const { return zmq_->msg_more(&message_) != 0; }

 private:
  const Zmq* zmq_;
  ZmqMessage message_;
};

}  // namespace rankcall
