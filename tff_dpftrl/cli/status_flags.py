"""Flags for the address of the status page of `tff-dpftrl serve`, and for its readers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tff_dpftrl import validation
from tff_dpftrl.runtime import addresses

if TYPE_CHECKING:
    from tff_dpftrl.runtime.status import access


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `check` and `made` read."""
    group = parser.add_argument_group(
        "status page",
        "It has no TLS. On another address than loopback it needs --status-token or --status-open, "
        "and answers only to the address itself and to --status-names.",
    )
    group.add_argument(
        "--status-address",
        default=addresses.DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="Address of the status page. Port 0 is any free port. Default: %(default)s.",
    )
    group.add_argument(
        "--status-token",
        metavar="FILE",
        help="File with the token that readers need; made with mode 0600 if there is none. The "
        "token is the password that a browser asks for (with any user name), or a bearer "
        "token, as Prometheus sends with authorization.credentials_file.",
    )
    group.add_argument(
        "--status-open",
        action="store_true",
        help="Let everybody who can reach the port read the page.",
    )
    group.add_argument(
        "--status-names",
        nargs="+",
        default=[],
        metavar="HOST",
        help="Further names and addresses by which readers reach the server, such as those of a "
        "proxy.",
    )


def check(args: argparse.Namespace) -> None:
    """Refuses flags that do not go together; reads and writes no file."""
    from tff_dpftrl.runtime.status import access

    if args.status_token and args.status_open:
        raise validation.UsageError("--status-token and --status-open exclude each other.")
    try:
        access.Access(names=args.status_names)
    except ValueError as error:
        raise validation.UsageError(f"--status-names: {error}") from None
    host, _ = addresses.split(args.status_address, "--status-address", can_listen=True)
    if not (addresses.is_loopback(host) or args.status_token or args.status_open):
        raise validation.UsageError(
            f"--status-address {args.status_address} is for other machines: say who may read the "
            "page, by --status-token FILE, or by --status-open if everybody who reaches the port."
        )


def made(args: argparse.Namespace) -> access.Access:
    """Returns the rule for readers of the page; makes the file of the token if there is none.

    A file without a token, or one that others may read, is refused.
    """
    from tff_dpftrl.runtime.status import access

    token = access.token_of(args.status_token) if args.status_token else None
    return access.Access(args.status_names, token, args.status_open)
