from gateway.model import Batch
from gateway.otlp.registry import Registry

def decode(registry: Registry, body: bytes, sender_address: str | None, received_ns: int) -> Batch: ...
