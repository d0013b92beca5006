"""Put on PYTHONPATH: every Python process below refuses to look beyond this machine, and says so on stderr.

An audit hook sees what any library does through Python's sockets. Loopback and Unix sockets stay open: torchrun
talks to its own ranks through them.
"""

import sys


def _is_here(address):
    if not isinstance(address, tuple):
        return True  # AF_UNIX: a path
    return str(address[0]).startswith("127.") or address[0] in ("::1", "localhost", "")


def _watch(event, arguments):
    if event in ("socket.connect", "socket.sendto") and not _is_here(arguments[1]):
        print(f"NETWORK: {event} {arguments[1]}", file=sys.stderr, flush=True)
        raise PermissionError(f"no network in tests: {arguments[1]}")


sys.addaudithook(_watch)
