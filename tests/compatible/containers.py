"""Files as the product writes them, for tests: records, a pickled map of their places, and a
tail.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from typing import Any


def container_of(records: Mapping[str, bytes], changed_map: Any = None) -> bytes:
    """A checkpoint of these records; `changed_map` in place of the right map."""
    places = {}
    data = b""
    for name, record in records.items():
        places[name] = (len(data), len(record))
        data += record
    return _with_tail(data, places if changed_map is None else changed_map)


def plain_bytes(data: bytes) -> bytes:
    """What the product writes when it is given bytes."""
    return _with_tail(data, {"mindio_save_data_type": "directly_bytes", "bytes_length": len(data)})


def _with_tail(data: bytes, found: Any) -> bytes:
    packed = pickle.dumps(found)
    return data + packed + struct.pack("<QQ", len(data), len(packed)) + b"mindio\0"
