"""Settings of Python's garbage collector for processes with thousands of sessions.

A session's memory is free as soon as it ends, but for five small objects of gRPC. Python does not
know that, and scans all live objects again and again as sessions open. In a round of thousands of
devices, this takes a tenth of the processor time and more. Where TensorFlow is imported, a scan
can stop the process for a good part of a second.
"""

from __future__ import annotations

import gc

_YOUNG = 50_000  # New objects before a collection of the youngest generation.
_OLDER = (20, 100)  # Thresholds of the older generations.


def settle() -> None:
    """Collects once, excludes all live objects from now on, and makes collections rare.

    A process that serves calls it once, when all is imported and loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *_OLDER)
