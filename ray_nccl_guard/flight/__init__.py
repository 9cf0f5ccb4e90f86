"""Flight Recorder dumps, read without torch and without trust: `load` them, `diagnose` the hang, `render` the answer.

>>> from ray_nccl_guard import flight
>>> print(flight.diagnose(flight.load(["/tmp/dumps"])).summary)  # doctest: +SKIP
"""

from ray_nccl_guard.flight.diagnose import diagnose
from ray_nccl_guard.flight.dump import Dump
from ray_nccl_guard.flight.load import Dumps, load
from ray_nccl_guard.flight.reader import read_dump
from ray_nccl_guard.flight.unpickle import Limits, UnreadableDump
from ray_nccl_guard.flight.verdict import FlightVerdict, Kind

__all__ = ["Dump", "Dumps", "FlightVerdict", "Kind", "Limits", "UnreadableDump", "diagnose", "load", "read_dump"]
