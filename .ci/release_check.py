"""The release check: what is built holds the package and nothing else, and its wheel runs the quickstart in a clean environment.

`make release-check`, or: python .ci/release_check.py [--with-dependencies]. torch, Ray and the other dependencies are those of
the environment that runs it; `--with-dependencies` installs them from the index instead, as a user's first install does.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ray_nccl_guard"
_BUILD_S, _INSTALL_S, _RUN_S = 300.0, 1800.0, 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with-dependencies", action="store_true", help="install torch, Ray and the rest from the index")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-check-") as name:
        folder = Path(name)
        wheel = built(folder)
        python = installed(folder / "venv", wheel, with_dependencies=args.with_dependencies)
        used(python, folder / "elsewhere")
    print("release check: ok")


def built(folder: Path) -> Path:
    """The wheel, built from the sdist: what the sdist lacks, the wheel lacks too."""
    files = [file for file in (ROOT / PACKAGE).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    wanted = [str(file.relative_to(ROOT)) for file in files]
    # A copy: the egg-info of an editable install in the checkout lists files, and setuptools would take them from there.
    source = folder / "source"
    for name in [*wanted, "pyproject.toml", "setup.cfg", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run("build", [sys.executable, "-m", "build", "--outdir", str(folder), str(source)], within_s=_BUILD_S)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    compare(wheel.name, {n for n in names if ".dist-info/" not in n}, set(wanted))
    expect(wheel.name, names, ["dist-info/licenses/LICENSE", "dist-info/entry_points.txt"])
    with tarfile.open(sdist) as archive_of_source:
        inside = [member.name.partition("/")[2] for member in archive_of_source.getmembers() if member.isfile()]
    compare(sdist.name, {n for n in inside if n.startswith(f"{PACKAGE}/")}, set(wanted))
    expect(sdist.name, inside, ["LICENSE", "README.md", "pyproject.toml"])
    other = sorted({n.split("/")[0] for n in inside if "/" in n} - {PACKAGE, f"{PACKAGE}.egg-info"})
    if other:
        raise SystemExit(f"release check: {sdist.name} holds {', '.join(other)}, which are not the package.")
    print(f"{wheel.name}: {len(wanted)} files of the package, and no others")
    return wheel


def compare(name: str, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        missing, unasked = sorted(wanted - found), sorted(found - wanted)
        raise SystemExit(
            f"release check: {name} is not the package of the checkout.\n"
            f"missing: {', '.join(missing) or 'nothing'}\nnot of it: {', '.join(unasked) or 'nothing'}"
        )


def expect(name: str, found: list[str], ends: list[str]) -> None:
    for end in ends:
        if not any(one.endswith(end) for one in found):
            raise SystemExit(f"release check: {name} has no {end}.")


def installed(folder: Path, wheel: Path, *, with_dependencies: bool) -> str:
    """The interpreter of a new environment with the wheel in it, whose dependencies are met."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if with_dependencies:
        run("install with dependencies", [*pip, f"{wheel}[html]"], within_s=_INSTALL_S)
        return python
    # A line of a path file puts a folder at the end of the path and does not follow the path files in it: an editable
    # install of the checkout is not seen.
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "base.pth").write_text("".join(f"{p}\n" for p in sys.path if p.endswith(("site-packages", "dist-packages"))))
    run("install", [*pip, "--no-deps", "--force-reinstall", str(wheel)], within_s=_INSTALL_S)
    not_met = [str(requirement) for requirement in requirements(wheel) if not met(requirement)]
    if not_met:
        raise SystemExit(f"release check: this environment lacks what {wheel.name} requires: {', '.join(not_met)}")
    return python


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel requires here, with the page of the report."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": "html"})]


def met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def used(python: str, folder: Path) -> None:
    """The quickstart and the commands after it, outside the checkout."""
    folder.mkdir()
    example = folder / "quickstart.py"
    example.write_bytes((ROOT / "examples" / "quickstart.py").read_bytes())
    where = run("import", [python, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"], cwd=folder)
    if not Path(where.strip()).is_relative_to(Path(python).parents[1]):
        raise SystemExit(f"release check: the environment imports {where.strip()}, not its own wheel.")
    output = run("quickstart", [python, str(example), "--storage", str(folder / "runs")], cwd=folder)
    report = folder / "runs" / "quickstart" / "nccl_guard" / "report.json"
    if "trained: " not in output or not report.is_file():
        raise SystemExit(f"release check: the quickstart left no report at {report}.\n{output[-4000:]}")
    command = str(Path(python).parent / "ray-nccl-guard")
    log = "NCCL WARN Cuda failure 209 'no kernel image is available for execution on the device'\n"
    for words in (["--version"], ["rules"], ["explain", "no_gpu_visible"], ["classify", "-"]):
        run(" ".join(words), [command, *words], cwd=folder, given=log)
    page = folder / "report.html"
    # 0: NCCL it is, 10: a fall-back, as on a machine without GPUs.
    run("report", [command, "report", str(report), "--html", str(page)], cwd=folder, good=(0, 10))
    if not page.is_file():
        raise SystemExit(f"release check: no page was written to {page}.")


def run(
    what: str,
    command: list[str],
    *,
    within_s: float = _RUN_S,
    cwd: Path = ROOT,
    given: str | None = None,
    good: tuple[int, ...] = (0,),
) -> str:
    """The command's output; ends the check if it fails."""
    started_s = time.monotonic()
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "RAY_ADDRESS")}
    done = subprocess.run(
        command, cwd=cwd, env=environ, input=given, capture_output=True, text=True, timeout=within_s, check=False
    )
    print(f"{time.monotonic() - started_s:6.1f} s  {what}", flush=True)
    if done.returncode not in good:
        raise SystemExit(f"release check: {what} failed with {done.returncode}.\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
