"""One HTTP reply, parsed as its bytes come (httptools). What is not needed of it is bounded or let go."""

from __future__ import annotations

import http.client

import httptools

MAX_TEXT_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 100


class Reply:
    """``status`` is 0 until the head is there. ``text``: the beginning of the body. ``keeps``: once ``complete``,
    whether the connection may be used again."""

    def __init__(self) -> None:
        self.status = 0
        self.retry_after: str | None = None
        self.text = bytearray()
        self.complete = False
        self.keeps = False
        self._head_bytes = 0
        self._headers = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take in the next bytes. Raises ``http.client.HTTPException`` for what is no reply."""
        if not self.status:
            if self._head_bytes >= _MAX_HEAD_BYTES:
                raise http.client.HTTPException("the head of the reply is too large")
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.complete:  # what comes behind a reply is not ours to read
                self.keeps = False
                return
            raise http.client.HTTPException(f"not an HTTP reply ({error or type(error).__name__})") from None

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > _MAX_HEADERS:
            raise ValueError(f"more than {_MAX_HEADERS} headers")
        if name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # others say that the reply is still to come
            self.status = status

    def on_body(self, data: bytes) -> None:
        self.text += data[: MAX_TEXT_BYTES - len(self.text)]

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True
            self.keeps = self._parser.should_keep_alive()
