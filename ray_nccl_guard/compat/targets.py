"""What a user calls a GPU (sm_120, 12.0, RTX 5090), as a compute capability."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ray_nccl_guard.compat.arch import Capability
from ray_nccl_guard.errors import UsageError

# NVIDIA's list "CUDA GPU Compute Capability"; marketing names without "NVIDIA", "GeForce", "Tesla".
_NAMES: Mapping[Capability, str] = {
    (5, 2): "m40, m60, m4",
    (6, 0): "p100, quadro gp100",
    (6, 1): "p40, p4, gtx 1080 ti, gtx 1080, gtx 1070, gtx 1060, gtx 1050, titan xp",
    (7, 0): "v100, v100s, titan v, quadro gv100",
    (7, 2): "jetson agx xavier, jetson xavier nx",
    (7, 5): "t4, t4g, rtx 2080 ti, rtx 2080, rtx 2070, rtx 2060, gtx 1660, gtx 1650, titan rtx,"
    " quadro rtx 8000, quadro rtx 6000, quadro rtx 5000, quadro rtx 4000",
    (8, 0): "a100, a100x, a30, a30x, a800",
    (8, 6): "a40, a10, a10g, a16, a2, rtx 3090 ti, rtx 3090, rtx 3080 ti, rtx 3080, rtx 3070, rtx 3060, rtx 3050,"
    " rtx a6000, rtx a5500, rtx a5000, rtx a4500, rtx a4000, rtx a2000",
    (8, 7): "jetson agx orin, jetson orin nx, jetson orin nano, orin",
    (8, 9): "l4, l40, l40s, l20, l2, rtx 4090, rtx 4080, rtx 4070 ti, rtx 4070, rtx 4060 ti, rtx 4060, rtx 4050,"
    " rtx 6000 ada, rtx 5000 ada, rtx 4500 ada, rtx 4000 ada, rtx 2000 ada",
    (9, 0): "h100, h200, h800, h20, gh200",
    (10, 0): "b200, gb200",
    (10, 3): "b300, gb300",
    (11, 0): "jetson agx thor, jetson thor, thor, jetson t5000, jetson t4000",
    (12, 0): "rtx 5090, rtx 5080, rtx 5070 ti, rtx 5070, rtx 5060 ti, rtx 5060, rtx 5050, rtx pro 6000, rtx pro 5000,"
    " rtx pro 4500, rtx pro 4000, rtx pro 2000",
    (12, 1): "gb10, dgx spark",
}
BY_NAME: Mapping[str, Capability] = {name.strip(): cc for cc, names in _NAMES.items() for name in names.split(",")}

_NUMBER = re.compile(r"(?:sm_?|compute_?|cc ?)?(?:(\d{1,2})\.(\d)|(\d{1,2})(\d)[af]?)")
_MAKERS = {"nvidia", "geforce", "tesla", "generation"}
# What may follow a model without changing its compute capability.
_TRIM = re.compile(
    r"(sxm\d?|pcie|nvl\d*|hbm\d\w?|\d+gb|mig|laptop|mobile|gpu|super|ti|d|server|workstation|edition|blackwell|max|q|ultra)"
)
# Below 3.0 no CUDA that ever built NCCL made code; such a number is a slip ("sm_12" for sm_120).
_LOWEST_MAJOR, _HIGHEST_MAJOR = 3, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU to judge for. `name` and `uuid` are empty where only an architecture was asked for."""

    capability: Capability
    name: str = ""
    uuid: str = ""

    @property
    def sm(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


def parse(text: str) -> Target:
    """A target as a user writes it: "sm_120", "12.0", "120", "RTX 5090", "NVIDIA A100-SXM4-80GB".

    Raises:
        UsageError: neither an architecture nor a known GPU name; the message offers the closest names.
    """
    words = text.strip().lower()
    number = _NUMBER.fullmatch(words)
    if number:
        major, minor = int(number[1] or number[3]), int(number[2] or number[4])
        if not _LOWEST_MAJOR <= major <= _HIGHEST_MAJOR:
            raise UsageError(
                f"{text} would be compute capability {major}.{minor}, which NCCL never had code for", help=_EXAMPLES
            )
        return Target(capability=(major, minor))
    capability = _by_name(words)
    if capability is None:
        raise UsageError(f"{text!r} is no GPU architecture and no GPU name known here", help=(*_closest(words), *_EXAMPLES))
    return Target(capability=capability, name=text.strip())


_EXAMPLES = ('--target sm_120, --target 12.0 and --target "RTX 5090" are the same',)


def _by_name(words: str) -> Capability | None:
    tokens = [token for token in re.split(r"[^a-z0-9]+", words) if token and token not in _MAKERS]
    if tokens and re.fullmatch(r"\d{4}", tokens[0]):
        tokens.insert(0, "rtx")  # "4090"
    for count in range(len(tokens), 0, -1):
        found = BY_NAME.get(" ".join(tokens[:count]))
        if found and all(_TRIM.fullmatch(token) for token in tokens[count:]):
            return found
    return None


def _closest(words: str) -> tuple[str, ...]:
    import difflib

    close = difflib.get_close_matches(words, BY_NAME, n=3)
    return (f"close names: {', '.join(close)}",) if close else ()
