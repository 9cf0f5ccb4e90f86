"""What NCCL's own configuration files set, which it reads at its first call: the user's word as much as the environment is."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

_SYSTEM = "/etc/nccl.conf"
_MOST_BYTES = 64 << 10  # a few lines are usual; whatever else lies there is no configuration


def settings(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """NCCL_ variables that a file sets and `environ` does not: name -> (value, the file).

    As NCCL does it (src/misc/param.cc, 2.30): the environment beats `NCCL_CONF_FILE`, or `~/.nccl.conf` where that is not
    set, and this beats `/etc/nccl.conf`; of two lines for one name the first counts. A file that cannot be read sets nothing.
    """
    found: dict[str, tuple[str, str]] = {}
    for path in _files(environ):
        for name, value in _lines(path):
            if name.startswith("NCCL_") and name not in environ:
                found.setdefault(name, (value, path))
    return found


def _files(environ: Mapping[str, str]) -> list[str]:
    own = environ.get("NCCL_CONF_FILE", "")
    if not own:
        try:
            own = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf")  # not $HOME: NCCL asks the user database
        except KeyError:  # a container's numeric user has no entry
            return [_SYSTEM]
    return [own, _SYSTEM]


def _lines(path: str) -> list[tuple[str, str]]:
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return []
    pairs = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
    return [(name, value) for name, equals, value in pairs if equals]
