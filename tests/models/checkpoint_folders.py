"""Checkpoints that `checkpoints/write_checkpoints.py` wrote with transformers."""

import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent / "checkpoints"
