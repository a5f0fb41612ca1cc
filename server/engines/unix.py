"""Unix sockets in folders of any depth: an address holds 107 bytes, a data folder's path may be longer."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """The same socket, named through a descriptor of its folder."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user can connect to; one left over from before is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    with _short(path) as address:
        server.bind(address)
    path.chmod(0o600)
    server.listen(1)
    return server


def connect(path: Path) -> socket.socket:
    """Raises OSError where nobody listens."""
    client = socket.socket(socket.AF_UNIX)
    with _short(path) as address:
        client.connect(address)
    return client
