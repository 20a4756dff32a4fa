"""What programs of the runtime's tests begin with: its functions by ctypes, and streams that stand still on demand."""

RUNTIME = """
import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
import glob
rt = ctypes.CDLL(next(p for p in os.environ["LD_PRELOAD"].split(":") if "libcudart" in p))
HOST = ctypes.CFUNCTYPE(None, c_void_p)
keep = []  # callbacks that streams still hold
rt.cudaGetErrorName.restype = rt.cudaGetErrorString.restype = c_char_p
SUCCESS, INVALID, OOM, NOT_READY, NOT_SUPPORTED = 0, 1, 2, 600, 801

def ok(code):
    assert code == 0, rt.cudaGetErrorName(code).decode()
def stream(flags=0):
    handle = c_void_p(); ok(rt.cudaStreamCreateWithFlags(byref(handle), c_uint(flags))); return handle
LEGACY, PER_THREAD, NON_BLOCKING = c_void_p(1), c_void_p(2), 1
def event(flags=0):
    handle = c_void_p(); ok(rt.cudaEventCreateWithFlags(byref(handle), c_uint(flags))); return handle
def record(e, s=LEGACY): ok(rt.cudaEventRecord(e, s))
def done(e): return rt.cudaEventQuery(e) == SUCCESS
def malloc(size):
    p = c_void_p(); ok(rt.cudaMalloc(byref(p), c_size_t(size))); return p
def host(s, function):
    callback = HOST(lambda _: function()); keep.append(callback)
    ok(rt.cudaLaunchHostFunc(s, callback, None))
class Gate:
    '''A host function in a stream that stands until it is opened.'''
    def __init__(self, s):
        self.event, self.reached = threading.Event(), threading.Event()
        def stand():
            self.reached.set(); assert self.event.wait(30)
        host(s, stand)
    def open(self): self.event.set()
"""
