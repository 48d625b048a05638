"""Python's search for cycles of garbage, set for processes with thousands of sessions.

What a session has used is free as soon as it ends, but for five small objects of gRPC's. Python
does not know that, and looks through all that is alive again and again as sessions open: a
tenth and more of the processor time of a round of thousands, and a stop of a good part of a
second now and then where TensorFlow is imported.
"""

from __future__ import annotations

import gc

_YOUNG = 50_000  # Objects that come before it looks at them.
_OLDER = (20, 100)


def settle() -> None:
    """Looks once more, and from now on seldom, and never again at what is alive now.

    To be called once by a process that serves, when all is imported and loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *_OLDER)
