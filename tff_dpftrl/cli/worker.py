"""`tff-dpftrl worker`: lends this machine to a training that runs elsewhere, or beside."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn

from tff_dpftrl import validation

_DESCRIPTION = """\
Start one worker of TensorFlow Federated, which trains clients for 'tff-dpftrl train --workers',
and keep it until Ctrl-C or SIGTERM. One worker uses all processors of its machine.

It is reached from this machine only, unless --trust-network is given: TFF's worker has neither
encryption nor authentication, and whoever reaches it can run code as you. Between machines that
do not trust their network, use a tunnel (ssh -L 7000:localhost:7000 HOST).
"""

_EPILOG = """\
examples:
  # In one terminal:
  tff-dpftrl worker --port 7000
  # In another:
  tff-dpftrl train --workers localhost:7000 --output results/run
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "worker",
        help="start a worker that trains clients for 'train --workers'",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="Port to listen at. Default: any free one."
    )
    parser.add_argument(
        "--trust-network",
        action="store_true",
        help="Listen to other machines too: everybody who reaches this one can run code as you.",
    )
    parser.add_argument(
        "--max-concurrent-clients",
        type=int,
        default=None,
        metavar="N",
        help="Train so many clients at a time, at most; each takes memory. Default: no limit.",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the worker until it is told to end, and returns the exit status if it ends before."""
    if not 0 <= args.port < 2**16:
        raise validation.UsageError(
            f"--port {args.port} is not a port: give one from 0 (any) to 65535."
        )
    if args.max_concurrent_clients is not None and args.max_concurrent_clients < 1:
        raise validation.UsageError(
            f"--max-concurrent-clients {args.max_concurrent_clients} must be at least 1."
        )
    from tff_dpftrl.execution import worker_process  # Needs gRPC, which comes with TFF.

    with (
        _orderly_end(),
        worker_process.serve(
            args.port,
            trust_network=args.trust_network,
            max_concurrent_calls=args.max_concurrent_clients or -1,
        ) as worker,
    ):
        if args.trust_network:
            warnings.warn(
                "everybody who reaches this machine can run code as you through this worker, and "
                "what is sent to it is not encrypted.",
                stacklevel=2,
            )
        print(f"Worker ready at {worker.address}", flush=True)
        status = worker.wait()
    print(f"tff-dpftrl worker: TFF's worker ended with status {status}.", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM end the worker before they end this process.

    The command's own handlers end the process on the spot (see `interruption`).
    """
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _exit(signum: int, frame: object) -> NoReturn:
    del frame
    print("\ntff-dpftrl worker: interrupted.", file=sys.stderr)
    raise SystemExit(128 + signum)
