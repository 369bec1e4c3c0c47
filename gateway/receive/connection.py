"""A connection of the HTTP ports: uvicorn's, with the bounds that it leaves out.

uvicorn waits for a request's head for ever and takes one of any size. A sender that dribbles, or never stops, would
keep a connection or fill the memory. Here a head has a size and a time; a body's bounds are in ``http``.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """``head_since`` is the loop's time at which a head began to be waited for; None while none is awaited."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_since: float | None = None
        self._head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.head_since = self.loop.time()

    def on_message_begin(self) -> None:
        self.head_since = self.loop.time()
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.head_since = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def close_if_silent(self, began_before: float) -> None:
        """Hang up if a head has been awaited since before that time."""
        if self.head_since is not None and self.head_since < began_before and not self.transport.is_closing():
            self.transport.close()
