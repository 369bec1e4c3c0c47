"""A connection of the HTTP ports: uvicorn's, with the bounds that it leaves out.

uvicorn waits for a request's head for ever and takes one of any size. A sender that dribbles, or never stops, would
keep a connection or fill the memory. Here a head has a size and a time; a body's bounds are in ``http``.

And a request that offers to go on in HTTP/2 (``Upgrade: h2c``, as Java's own client does with its first one) is
answered in HTTP/1.1, with its body: uvicorn's parser takes such a request to have none.
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_OF_AN_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


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
        if self.parser.should_upgrade():
            return
        self.head_since = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self.head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it offered no upgrade: that is how to decline one (RFC 9110, 7.8)."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name not in _OF_AN_UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def close_if_silent(self, began_before: float) -> None:
        """Hang up if a head has been awaited since before that time."""
        if self.head_since is not None and self.head_since < began_before and not self.transport.is_closing():
            self.transport.close()
