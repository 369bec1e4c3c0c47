from collections.abc import Callable, Iterable

from gateway.model import Series
from gateway.series import SeriesTable

class Encoder:
    oversized: list[bytes]
    def __init__(
        self,
        apply: Callable[[Series], Series] | None,
        parity: str,
        share: SeriesTable | None = None,
        max_body_bytes: int = ...,
    ) -> None: ...
    def forget(self) -> None: ...
    def define(self, definitions: Iterable[tuple[int, bytes]]) -> None: ...
    def add(self, body: bytes | memoryview) -> None: ...
    def finish(self) -> list[tuple[bytes, int]]: ...
    @property
    def pending_bytes(self) -> int: ...
