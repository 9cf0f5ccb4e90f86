"""What it costs to publish a report: making its JSON and its page, and writing both to a local disk.

    python benchmarks/publish.py [--ranks 4 64 1024 4096] [--json]

The report is that of tests/unit/report_cases.py in which one rank fails and gloo passes, at the given number of ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyarrow import fs

from benchmarks import harness
from ray_nccl_guard import html, render
from ray_nccl_guard.ray_train import storage
from tests.unit.report_cases import fell_back


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        start_s = time.monotonic()
        run()
        return (time.monotonic() - start_s) * 1e3

    return once


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    top, rows = harness.head("What publishing a report costs"), []
    for ranks in args.ranks:
        report = fell_back(ranks, culprit=3)
        text, page = json.dumps(report.to_json(), indent=1).encode(), html.page(report).encode()
        with tempfile.TemporaryDirectory() as folder:
            files = {"report.json": text, "report.html": page}
            cases: dict[str, Callable[[], object]] = {
                "message": lambda report=report: render.render(report),  # type: ignore[misc]
                "JSON": lambda report=report: json.dumps(report.to_json(), indent=1),  # type: ignore[misc]
                "page": lambda report=report: html.page(report),  # type: ignore[misc]
                "write": lambda files=files, folder=folder: storage.write(fs.LocalFileSystem(), folder, lambda: files),  # type: ignore[misc]
            }
            taken = harness.alternate({name: timed(run) for name, run in cases.items()}, rounds=args.rounds)
        sizes = {"JSON": len(text) / 1e6, "page": len(page) / 1e6}
        rows += [
            {"case": f"{ranks} ranks, {name}", "unit": "ms", **harness.summary(v), "MB": sizes.get(name)}
            for name, v in taken.items()
        ]
    most = max(args.ranks)
    whole = {row["case"].partition(", ")[2]: row["median"] for row in rows if row["case"].startswith(f"{most} ranks")}
    parts = ", ".join(f"{name} {ms:.3g}" for name, ms in whole.items())
    harness.show(args, top, rows, found=[f"A report of {most} ranks, ms: {parts}."])


if __name__ == "__main__":
    main()
