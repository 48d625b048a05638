"""Allocators of host memory, which by default keep what large tensors used."""

from __future__ import annotations

import ctypes
import os

_SYSTEM = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
_M_MMAP_THRESHOLD = -3  # From glibc's malloc.h.
_MMAP_BYTES = 1 << 20


def give_back_memory() -> None:
    """Makes this process give the memory of large tensors back as soon as they are freed.

    TensorFlow with oneDNN, as in its wheels for Linux, takes host memory from a pool that grows
    by doubling and never shrinks: after a round it held seventeen copies of the model that no
    tensor used. Here it takes memory from the C library. That, if it is glibc, would come to keep
    blocks of up to 32 MB for reuse; here blocks from 1 MiB on are mapped, and so unmapped. The
    kernel clears each anew: a large model's round takes about a third more processor time.

    These are settings of the whole program. TensorFlow reads its own before its first tensor;
    later calls do not change it. The environment variables TF_ONEDNN_USE_SYSTEM_ALLOCATOR and
    MALLOC_MMAP_THRESHOLD_, if set, take precedence.
    """
    os.environ.setdefault(_SYSTEM, "1")
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Not in every C library.
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
