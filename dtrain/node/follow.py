"""Sending a job's streams: what the files hold beyond the offsets that the other side has."""

from __future__ import annotations

import os
from typing import Callable, Optional

from dtrain.node import wire
from dtrain.node.folder import JobFolder

Send = Callable[[wire.Message, bytes], None]
_ROUND_BYTES = 8 * 1024 * 1024  # of one stream before the next has its turn


class Follower:
    """Knows how far each stream of a job was sent."""

    def __init__(self, folder: JobFolder, offsets: dict[str, int], send: Send, *, logs: bool) -> None:
        self._folder = folder
        self._offsets = dict(offsets)
        self._send = send
        self._logs = logs
        self._ends: Optional[dict[str, int]] = None  # beyond which nothing is sent

    def send_all(self) -> None:
        """Send what the streams hold now, and not what comes meanwhile: workers may print faster than this sends."""
        self._ends = {name: os.path.getsize(self._folder.stream(name)) for name in self._folder.stream_names()}
        while self.send_new():
            pass

    def send_new(self) -> bool:
        """Send what the streams hold by now, up to a bound for each. Whether anything was sent.

        The line that says that the node ended goes last: who has read it has all the logs.
        """
        events = self._read(wire.EVENTS)
        ending = b'"type": "NodeEnded"' in events
        if not ending:
            self._send_bytes(wire.EVENTS, events)
        sent = bool(events) and not ending
        for name in self._folder.stream_names():
            if name == wire.METRICS or (name != wire.EVENTS and (self._logs or ending)):
                while self.send_some(name):
                    sent = True
                    if not ending:
                        break
        if ending:
            self._send_bytes(wire.EVENTS, events)
            sent = True
        return sent

    def send_some(self, name: str) -> bool:
        """Send what one stream holds, up to a bound. Whether there was anything."""
        budget = _ROUND_BYTES
        while budget > 0:
            data = self._read(name)
            self._send_bytes(name, data)
            budget -= len(data)
            if len(data) < wire.CHUNK_BYTES:
                return budget < _ROUND_BYTES
        return True

    def _read(self, name: str) -> bytes:
        path, offset = self._folder.stream(name), self._offsets.get(name, 0)
        try:
            if os.stat(path).st_size <= offset:  # which most looks find, and no other way to see it costs less
                return b""
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            ahead = wire.CHUNK_BYTES if self._ends is None else self._ends.get(name, 0) - offset
            return os.pread(fd, max(0, min(ahead, wire.CHUNK_BYTES)), offset)
        finally:
            os.close(fd)

    def _send_bytes(self, name: str, data: bytes) -> None:
        if data:
            offset = self._offsets.get(name, 0)
            self._send(wire.StreamBytes(name, offset), data)
            self._offsets[name] = offset + len(data)
