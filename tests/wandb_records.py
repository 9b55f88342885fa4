"""Read what wandb keeps of a run on disk: its transaction log, which ``wandb sync`` uploads.

The file is a LevelDB log of protobuf records: a header of 7 bytes, then blocks of 32 KiB with
pieces of ``crc32 (4 bytes), length (2), kind (1)`` and their data; kinds 1 to 4 are a whole record,
its first, a middle and its last piece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32_768
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the protobuf records of a ``run-*.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, pieces = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if not kind:  # the rest of the block is empty
            position += left
            continue
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


def offline_run(run_dir: Path) -> dict[str, Any]:
    """Return what all offline starts of a run hold together.

    Wandb's service is ended first, as at the end of a process: ``finish`` returns before the last
    records are on disk.

    ``ids``, ``config``, ``history`` (rows in order), ``metrics`` (step axis and summary of every
    name that was defined), ``files``, ``artifacts`` (type -> names of files).
    """
    import wandb

    wandb.teardown()
    found: dict[str, Any] = {
        "ids": [], "config": {}, "history": [], "metrics": {}, "files": [], "artifacts": {},
    }  # fmt: skip
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    found["ids"].append(record.run.run_id)
                    found["config"] |= _items(record.run.config.update)
                case "config":
                    found["config"] |= _items(record.config.update)
                case "history":
                    found["history"].append(_items(record.history.item))
                case "metric":
                    name = record.metric.name or record.metric.glob_name
                    found["metrics"][name] = record.metric
                case "files":
                    found["files"] += [each.path for each in record.files.files]
                case "artifact":
                    manifest = record.artifact.manifest.contents
                    found["artifacts"].setdefault(record.artifact.type, []).append(
                        sorted(entry.path for entry in manifest)
                    )
                case "request":
                    request = record.request
                    if request.WhichOneof("request_type") == "log_artifact":
                        artifact = request.log_artifact.artifact
                        manifest = artifact.manifest.contents
                        found["artifacts"].setdefault(artifact.type, []).append(
                            sorted(entry.path for entry in manifest)
                        )
    return found


def _items(items: Any) -> dict[str, Any]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}
