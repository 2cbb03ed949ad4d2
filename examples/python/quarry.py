"""Quarry from Python, by ctypes: as much of quarry.h as main.py uses, to be copied and extended.

A call that was not done raises Error, one whose outcome is unknown raises Unknown. Start worker processes with
multiprocessing's "spawn": a process that loads the library cannot fork and go on using it.
"""

import ctypes as c
import os


class Ref(c.Structure):
    _fields_ = [("address", c.c_uint64), ("incarnation", c.c_uint64)]


class _Error(c.Structure):
    _fields_ = [("reason", c.c_int32), ("text", c.c_char * 252)]


class _AllocOptions(c.Structure):
    _fields_ = [
        ("bytes", c.c_size_t),
        ("capacity", c.c_uint64),
        ("tag", c.c_uint32),
        ("replicas", c.c_uint32),
        ("durability", c.c_uint32),
        ("write_once", c.c_uint32),
    ]


class Error(Exception):
    """The call was not done, and never will be. reason is a number of enum quarry_reason."""

    def __init__(self, reason, text):
        super().__init__(text)
        self.reason = reason


class Unknown(Error):
    """The call was done once or not at all: read to find out."""


BUFFER, NOT_FOUND, CONFLICT, EXISTS = 4, 21, 12, 22

_lib = c.CDLL(os.environ.get("LIBQUARRY", "libquarry.so.1"))
_handle, _bytes, _size = c.c_uint64, c.c_char_p, c.c_size_t
_psize, _pu64, _perr = c.POINTER(c.c_size_t), c.POINTER(c.c_uint64), c.POINTER(_Error)
_entry = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, _size, c.c_void_p, _size, c.c_uint64)

for _name, _args in {
    "connect": [c.c_void_p, _pu64],
    "close": [_handle],
    "alloc": [_handle, _bytes, _size, c.c_void_p, c.POINTER(Ref)],
    "read": [_handle, Ref, c.c_void_p, _size, _psize, c.c_void_p],
    "write": [_handle, Ref, _bytes, _size],
    "free": [_handle, Ref],
    "name_create": [_handle, _bytes, _bytes, Ref, _pu64],
    "name_lookup": [_handle, _bytes, c.POINTER(Ref), _pu64],
    "name_delete": [_handle, _bytes, c.c_uint64],
    "tree_open": [_handle, _bytes, c.c_uint32, _pu64],
    "tree_drop": [_handle],
    "get": [_handle, _bytes, _size, c.c_void_p, _size, _psize, _pu64],
    "put": [_handle, _bytes, _size, _bytes, _size],
    "delete": [_handle, _bytes, _size],
    "scan": [_handle, _bytes, _size, _bytes, _size, c.c_uint64, c.c_int, _entry, c.c_void_p],
}.items():
    getattr(_lib, "quarry_" + _name).argtypes = _args + [_perr]


def _call(name, *args):
    err = _Error()
    answer = getattr(_lib, "quarry_" + name)(*args, c.byref(err))
    if answer:
        raise (Unknown if answer == 2 else Error)(err.reason, err.text.decode(errors="replace"))


def _read(name, *args):
    """_read calls a function that fills a buffer, again with a larger one where it was too small."""
    room = 4096
    while True:
        buffer, n = c.create_string_buffer(room), c.c_size_t()
        try:
            _call(name, *args, buffer, room, c.byref(n), None)
            return buffer.raw[: n.value]
        except Error as e:
            if e.reason != BUFFER:
                raise
            room = n.value


class Client:
    """A client, configured by the environment as the command quarry is. Any number of threads may use it."""

    def __init__(self):
        handle = c.c_uint64()
        _call("connect", None, c.byref(handle))
        self._handle = handle.value

    def close(self):
        _call("close", self._handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def alloc(self, payload, capacity=0):
        """capacity is the length of the largest later payload; 0: about that of the first one."""
        ref, options = Ref(), _AllocOptions(bytes=c.sizeof(_AllocOptions), capacity=capacity)
        _call("alloc", self._handle, payload, len(payload), c.byref(options), c.byref(ref))
        return ref

    def read(self, ref):
        return _read("read", self._handle, ref)

    def write(self, ref, payload):
        _call("write", self._handle, ref, payload, len(payload))

    def free(self, ref):
        _call("free", self._handle, ref)

    def name(self, name, ref, kind="object"):
        _call("name_create", self._handle, name.encode(), kind.encode(), ref, None)

    def lookup(self, name):
        ref = Ref()
        _call("name_lookup", self._handle, name.encode(), c.byref(ref), None)
        return ref

    def unname(self, name):
        _call("name_delete", self._handle, name.encode(), 0)

    def tree(self, name, create=True):
        handle = c.c_uint64()
        _call("tree_open", self._handle, name.encode(), int(create), c.byref(handle))
        return Tree(handle.value)


class Tree:
    def __init__(self, handle):
        self._handle = handle

    def __getitem__(self, key):
        try:
            return _read("get", self._handle, key, len(key))
        except Error as e:
            raise KeyError(key) if e.reason == NOT_FOUND else e

    def __setitem__(self, key, value):
        _call("put", self._handle, key, len(key), value, len(value))

    def __delitem__(self, key):
        _call("delete", self._handle, key, len(key))

    def items(self, start=b"", end=None):
        found = []

        @_entry
        def take(_, key, key_bytes, value, value_bytes, version):
            found.append((c.string_at(key, key_bytes), c.string_at(value, value_bytes)))
            return 0

        _call("scan", self._handle, start, len(start), end, len(end or b""), 0, 0, take, None)
        return found

    def drop(self):
        _call("tree_drop", self._handle)
