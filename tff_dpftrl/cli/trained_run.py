"""Which trained model a command is about: the arguments, and the model they name."""

from __future__ import annotations

import argparse

from tff_dpftrl.training import trained_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and --model."""
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="Folder that train wrote to, or a copy of its model.npz and vocabulary.json; or a "
        "checkpoint in Hugging Face's layout.",
    )
    parser.add_argument(
        "--model",
        choices=("last", "best"),
        default="last",
        help="The model after the last round (model.npz), or the one that was best on the held-out "
        "users (best_model.npz). Default: last.",
    )


def find(args: argparse.Namespace) -> trained_model.TrainedFiles:
    """Finds the model's files; refuses what is none before TensorFlow is imported."""
    return trained_model.find(args.run_folder, args.model)
