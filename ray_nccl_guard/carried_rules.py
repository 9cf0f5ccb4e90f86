"""Rule packs as one value of an environment variable, for nodes that do not have the folders."""

from __future__ import annotations

import base64
import json
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from ray_nccl_guard.errors import UsageError
from ray_nccl_guard.rulebook import Rule, load_rules

VARIABLE = "RAY_NCCL_GUARD_CARRIED_RULES"


def pack(folders: Iterable[Path]) -> str:
    """The rules of `folders`, without their captured logs (those serve tests and `explain`)."""
    texts = {file.name: file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("*.toml"))}
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()


def unpack(value: str) -> tuple[Rule, ...]:
    """The whole rule book: the shipped rules, then the packed ones.

    Raises:
        UsageError: the value is not what `pack` makes, or a rule in it is not valid.
    """
    try:
        texts = json.loads(zlib.decompress(base64.b64decode(value)))
    except (ValueError, zlib.error) as error:
        raise UsageError(f"{VARIABLE} does not hold rule packs: {error}") from error
    with tempfile.TemporaryDirectory(prefix="nccl-guard-rules-") as folder:
        for name, text in texts.items():
            Path(folder, Path(name).name).write_text(text, encoding="utf-8")
        return load_rules(folder)
