"""Writes docs/fault-matrix.md from what the matrix recorded: `python -m tests.fakegpu.matrix_page RECORD.jsonl...`.

A record is made by `FAULT_MATRIX_RECORD=RECORD.jsonl pytest tests/fakegpu/test_matrix.py`, once per installed torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fault-matrix.md"
HEAD = """# The fault matrix

Every fault that the double plays (`tests/fakegpu/README.md` has its language) and what the guard made of it: one row a case,
one column a backend. A cell is class, culprit ranks, failing step, then what follows. On the double, never on a GPU: it shows
that the guard names and deals with what torch and NCCL say, not that they say it on a real machine.
Written by `python -m tests.fakegpu.matrix_page`; do not edit by hand.

"""


def main(paths: list[str]) -> int:
    """Write the page; 1 if a recorded outcome was not the expected one."""
    lines = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    # A case that was played again counts as it ended last.
    lines = list({(line["case"], line["torch"], line["torch_backend"]): line for line in lines}.values())
    columns = sorted({(line["torch"], line["torch_backend"]) for line in lines})
    cells = {(line["case"], line["torch"], line["torch_backend"]): line for line in lines}
    cases = {line["case"]: line for line in lines}
    rows = ["| case | ranks | fault | " + " | ".join(f"{torch} {backend}" for torch, backend in columns) + " |"]
    rows.append("|---" * (3 + len(columns)) + "|")
    for name, case in cases.items():
        told = [cell(cells.get((name, *column))) for column in columns]
        rows.append(
            f"| {name} | {case['ranks']} | {'`' + case['fault'] + '`' if case['fault'] else ''} | " + " | ".join(told) + " |"
        )
    wrong = [line for line in lines if not line["right"]]
    counts = [
        f"{torch} {backend}: {sum((line['torch'], line['torch_backend']) == (torch, backend) for line in lines)} cases"
        for torch, backend in columns
    ]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n\n" + "; ".join(counts) + ".\n")
    print(f"{len(cases)} cases on {len(columns)} backends, {len(wrong)} not as expected -> {PAGE}")
    return 1 if wrong else 0


def cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    culprits = f" on {', '.join(map(str, line['culprits']))}" if line["culprits"] else ""
    step = f" in {line['step']}" if line["step"] else ""
    relief = "".join(f" {k}={v}" for k, v in line["relief"].items())
    end = line["action"] if line["action"] in ("refuse", "proceed") else f"{line['backend']}{relief}"
    return f"{line['failure']}{culprits}{step}: {end}{'' if line['right'] else ' (NOT AS EXPECTED)'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
