"""With FAKE_CUDA_OPS=1, gives kernels an effect in every Python process as soon as it has imported torch."""

import importlib.machinery
import importlib.util
import os
import sys


class _AfterTorch(importlib.machinery.PathFinder):
    """Finds torch as usual and adds one step after its module has run."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_install(module):
                run(module)
                import fakecuda_ops

                fakecuda_ops.install()

            spec.loader.exec_module = run_and_install
        return spec


def _run_the_one_behind_us() -> None:
    """A venv or distribution may have a sitecustomize of its own: ours must not hide it."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("FAKE_CUDA_OPS") == "1":
    sys.meta_path.insert(0, _AfterTorch)
_run_the_one_behind_us()
