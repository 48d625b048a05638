"""`tff-dpftrl serve`: the server of one population of devices, or of several."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import pathlib
import shlex
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import packages, validation
from tff_dpftrl.cli import status_flags, trust_flags
from tff_dpftrl.runtime import addresses

if TYPE_CHECKING:
    from tff_dpftrl.runtime import serving

_DESCRIPTION = """\
Serve tasks (`tff-dpftrl task new`) to the devices of a population: choose devices for every round,
sum their reports as they come, add the noise, commit, and only then release the model.

What is committed is in the store: after a crash or Ctrl-C, the same command goes on with the
committed round. The store holds the seed of the noise: keep it as secret as the devices' reports.
Nothing about a single device is written anywhere: if the process crashes, it leaves no core file.

Several populations share the port, the processes and the store of one server. Each has a leader, a
pace and rounds of its own, and a share of sessions and check-ins that the others leave to it
(--shares). A device that is in several names its population when it connects.

Devices connect with gRPC over TLS, and show a token that an issuer signed for them. Unless told
otherwise, certificate and issuer's key are made in the server's folder, for devices here.
"""

_EPILOG = """\
examples:
  tff-dpftrl serve --population keyboard --task tasks/nwp --store store/

  # Devices on this machine.
  tff-dpftrl fleet --server-folder store/server --population keyboard --data docs --devices 300
  tff-dpftrl device --server-folder store/server --population keyboard --examples my.sqlite

  # Only tasks whose devices sum their reports themselves.
  tff-dpftrl serve --population keyboard --task tasks/nwp --store store/ --secure-aggregation

  # Two tasks that share the devices, in PostgreSQL, with a custom certificate.
  tff-dpftrl serve --population keyboard --task tasks/a tasks/b \\
      --store postgresql://user@host/name --server-folder server/ \\
      --address 0.0.0.0:8443 --certificate fullchain.pem --private-key key.pem \\
      --attestation-keys issuer.pub

  # Two populations, of which the second one is smaller and keeps a tenth for itself.
  tff-dpftrl serve --population keyboard --population speech --task tasks/nwp tasks/asr \\
      --population-size 10000 500 --shares 0.5 0.1 --store store/

  # On two machines, with the same files at the same paths, in a network of their own: as it
  # comes, Ray has neither passwords nor encryption. First `ray start` on each of them.
  ray start --head --port=6379 --node-ip-address=10.0.0.1
  ray start --address=10.0.0.1:6379                                # on the second machine
  tff-dpftrl serve --engine ray --ray-address auto --selectors 2 --workers 4 \\
      --population keyboard --task tasks/nwp --store postgresql://user@10.0.0.1/name \\
      --server-folder server/ --address 0.0.0.0:8443 --names 10.0.0.1 10.0.0.2
  tff-dpftrl device --server 10.0.0.1:8443,10.0.0.2:8444 ...       # on any machine
"""


_NO_ATTESTATION = "Whoever connects is taken for a device: there is no attestation."
_SESSIONS_PER = {
    "address": "Largest number of open sessions of one network address (of IPv6: one network of "
    "64 bits), at each Selector. Raise it if devices come through few addresses, as "
    "through a load balancer. Default: 500, and no limit for devices on this machine; "
    "a number that is given holds for them, too.",
    "connection": "Largest number of open sessions of one connection. Raise it for a fleet on "
    "another machine, which shares a few connections. Default: 16, and no limit for "
    "devices on this machine; a number that is given holds for them, too.",
}
_NUM_HOSTS = 2  # Of each kind, on Ray.


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--population",
        required=True,
        action="extend",
        nargs="+",
        metavar="NAME",
        help="Names of the populations. May be given several times.",
    )
    parser.add_argument(
        "--task",
        required=True,
        action="extend",
        nargs="+",
        metavar="DIR",
        help="Folders of the populations' tasks. Tasks of one population share its rounds by their "
        "weights.",
    )
    parser.add_argument(
        "--store",
        required=True,
        metavar="PLACE",
        help="Store of the server: a folder, made if there is none, or the URL of a PostgreSQL "
        "database.",
    )
    parser.add_argument(
        "--plan-keys",
        nargs="+",
        default=[],
        metavar="FILE",
        help=("Public keys of trusted signers of tasks. Default: the key in each task's folder."),
    )
    parser.add_argument(
        "--secure-aggregation",
        action="store_true",
        help="Refuse tasks whose reports this server would see: all must be made with task new "
        "--secure-aggregation. Such tasks use it with or without this flag.",
    )
    trust_flags.add_reviewers(parser, "Serve only tasks that were approved by (task approve)")
    listening = parser.add_argument_group("where it listens, and how it is known")
    listening.add_argument(
        "--address",
        default=addresses.DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="Address for devices, HOST:PORT. Port 0 is any free port, and another one after a "
        "restart; with a fixed port, devices find the server again. Default: %(default)s.",
    )
    listening.add_argument(
        "--server-folder",
        metavar="DIR",
        help="Folder of certificate and keys, which are made if missing. Default: "
        "server, in the store's folder.",
    )
    listening.add_argument(
        "--certificate", metavar="FILE", help="Custom certificate of the server, PEM."
    )
    listening.add_argument(
        "--private-key", metavar="FILE", help="Private key of the certificate, PEM."
    )
    listening.add_argument(
        "--names",
        nargs="+",
        default=None,
        metavar="HOST",
        help="Host names and addresses in the certificate that is made. A certificate that was "
        "made before must have them. Default: localhost 127.0.0.1.",
    )
    status_flags.add_arguments(parser)
    who = parser.add_argument_group("who is a device")
    who.add_argument(
        "--attestation-keys",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Public keys of issuers of attestation tokens. Default: a key in the server's folder.",
    )
    who.add_argument(
        "--no-attestation",
        action="store_true",
        help="Accept devices without attestation. One program can then pose as any "
        "number of devices.",
    )
    who.add_argument(
        "--attestation-roots",
        metavar="FILE",
        help="Root certificates (PEM) of a platform, instead of issuers' keys. Devices show "
        "certificates that lead to one of them. Use this only if many devices share each "
        "certificate: one of a single device identifies the device in every round.",
    )
    who.add_argument(
        "--attestation-revoked",
        metavar="FILE",
        help="File of serial numbers of revoked certificates, in hexadecimal, one a line. Devices "
        "with such a certificate under --attestation-roots are refused.",
    )
    for what in ("address", "connection"):
        who.add_argument(
            f"--sessions-per-{what}",
            type=int,
            metavar="N",
            help=_SESSIONS_PER[what],
        )
    who.add_argument(
        "--shares",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="Share of open sessions and of check-ins a second that is reserved for each "
        "population, in the order of --population, at each Selector. Whoever comes first gets the "
        "rest, so that one population cannot shut out another. Default: even shares of one half.",
    )
    pace = parser.add_argument_group("how often devices come")
    pace.add_argument(
        "--population-size",
        type=float,
        nargs="+",
        metavar="N",
        help="Approximate number of devices of each population that are available at a time, in "
        "the order of --population, to begin with. Check-ins soon correct a number that is "
        "too low. Default: the tasks' num_devices.",
    )
    pace.add_argument(
        "--availability",
        metavar="CURVE",
        help="Relative numbers of available devices at each full hour of UTC, to begin with: 24 "
        "numbers separated by commas, or a file with them. Default: the same at all hours. "
        "The server learns both from check-ins within days (with --engine ray it keeps to "
        "what it is given).",
    )
    pace.add_argument(
        "--round-seconds",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Approximate length of a round in seconds. Enough devices for one round are asked to "
        "come in this time. Default: %(default)g.",
    )
    pace.add_argument(
        "--most-over-selection",
        type=float,
        default=3.0,
        metavar="FACTOR",
        help="Largest number of devices to choose for each report of a round's goal, while many "
        "chosen devices do not report. A sum never has more devices than its task declares. "
        "With 1, no more devices are chosen than the task declares, either. Default: %(default)g.",
    )
    machines = parser.add_argument_group(
        "on many machines",
        "Roles are processes of a Ray cluster, which starts those anew that die. Each node needs "
        "this package and the task's, server's and key files at the same paths; the store is a "
        "database that all reach.",
    )
    machines.add_argument(
        "--engine",
        choices=("asyncio", "ray"),
        default="asyncio",
        help="Engine of the server: this process (asyncio), or a Ray cluster (ray). "
        "Default: %(default)s.",
    )
    machines.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster, or auto for the cluster that this machine is a node of. "
        "Default: Ray is started on this machine, on loopback, and ends with this command.",
    )
    machines.add_argument(
        "--selectors",
        type=int,
        metavar="N",
        help="Number of processes that devices connect to, on the port of --address and the next "
        "ones. Host 0.0.0.0 is the address of the node. Default: 2.",
    )
    machines.add_argument(
        "--workers", type=int, metavar="N", help="Number of processes that sum reports. Default: 2."
    )
    machines.add_argument(
        "--detach",
        action="store_true",
        help="Leave the server running at Ctrl-C, without the status page. The same "
        "command finds it again; without --detach, its Ctrl-C stops the server.",
    )
    machines.add_argument(
        "--stop",
        action="store_true",
        help="Stop the server of these populations on the cluster, however it was started, and do "
        "nothing else.",
    )
    parser.add_argument(
        "--until-done",
        action="store_true",
        help="End when no task can have another round. Default: serve until Ctrl-C.",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it, and returns the exit status."""
    _check(args)
    availability = _availability(args.availability)
    from tff_dpftrl.runtime import core_files, serving, signing_keys
    from tff_dpftrl.runtime.server import attesting, limits
    from tff_dpftrl.runtime.server import server as server_lib

    folder = serving.folder_for(args.store, args.server_folder)
    if args.stop:
        return _stop(args, folder)
    keys = [signing_keys.load_public(path) for path in args.plan_keys]
    reviewers = trust_flags.reviewers(args)
    _progress("Loading the tasks ...")
    from tff_dpftrl.runtime.store import sql
    from tff_dpftrl.runtime.tasks import planned_task, task_folder

    tasks = [planned_task.load(path, keys or None) for path in args.task]
    keys = keys or [task_folder.bundled_key(path) for path in args.task]
    _check_populations(args, tasks)
    _check_secure_aggregation(args, tasks, folder)
    if args.attestation_roots:  # Before anything is made.
        attesting.from_files(None, args.attestation_roots, args.attestation_revoked)
    if reviewers is not None:
        for task in tasks:
            try:
                given = reviewers.check(task.folder.signed.server, task.name)
            except validation.UsageError as error:
                path = shlex.quote(str(task.folder.path))
                raise validation.UsageError(
                    f"{error} Reviewers approve it by tff-dpftrl task approve {path} --key FILE."
                ) from None
            _progress(f"{task.name}: approved by {', '.join(given)}.")
    folder.make(
        args.names,
        certificate=args.certificate is None,
        issuer=_issuers(args, folder) == [folder.issuer_public],
    )
    folder.keep_plan_keys(keys)
    sizes = {name: 0.0 for name in args.population}
    for task in tasks:
        sizes[task.population] = max(
            sizes[task.population], task.folder.config.serving.num_devices or 0
        )
    settings = serving.Settings(
        address=args.address,
        status_address=args.status_address,
        status_access=status_flags.made(args),
        population_size={**sizes, **_by_population(args, args.population_size)},
        availability=availability,
        round_seconds=args.round_seconds,
        limits=limits.Limits(
            sessions_per_address=args.sessions_per_address,
            sessions_per_connection=args.sessions_per_connection,
        ),
        most_over_selection=args.most_over_selection,
        shares=_by_population(args, args.shares),
    )
    core_files.forbid()
    is_one_process = args.engine != "ray"  # Other processes get states as messages.
    with contextlib.closing(sql.SqlStore(args.store, leaves_states=is_one_process)) as store:
        if not is_one_process:
            served = _on_ray(args, tasks, store, folder, settings)
        else:
            served = serving.Serving(
                tasks,
                store,
                folder,
                settings,
                certificate=args.certificate,
                private_key=args.private_key,
                attestation=_attestation(args, folder),
                progress=_progress,
            )
        try:
            _run_loop(_serve(served, folder, args, keys))
        except server_lib.ServerError as error:
            raise OSError(str(error)) from None
    return 0


def _on_ray(args: argparse.Namespace, tasks, store, folder, settings) -> serving.Serving:
    """Serves on a Ray cluster, and returns the exit status."""
    from tff_dpftrl.runtime.cluster import serving as cluster_serving

    if args.no_attestation:
        _progress(_NO_ATTESTATION)
    return cluster_serving.ClusterServing(
        _deployment(args, folder, settings),
        tasks,
        store,
        folder,
        settings,
        ray_address=args.ray_address,
        leave=args.detach,
        progress=_progress,
    )


def _deployment(args: argparse.Namespace, folder, settings):
    """Returns the description that hosts on a Ray cluster are built from."""
    from tff_dpftrl.runtime.cluster import serving as cluster_serving

    files = cluster_serving.Files(
        tasks=args.task,
        plan_keys=args.plan_keys,
        certificate=args.certificate or folder.certificate,
        private_key=args.private_key or folder.private_key,
        attestation_keys=_issuers(args, folder),
        attestation_roots=args.attestation_roots,
        attestation_revoked=args.attestation_revoked,
    )
    return cluster_serving.deployment(
        tuple(args.population),
        args.store,
        files,
        settings,
        num_selectors=args.selectors or _NUM_HOSTS,
        num_workers=args.workers or _NUM_HOSTS,
    )


def _stop(args: argparse.Namespace, folder) -> int:
    """Stops a server that was left running."""
    from tff_dpftrl.runtime import serving
    from tff_dpftrl.runtime.cluster import cluster

    deployed = _deployment(args, folder, serving.Settings())
    running = cluster.RayCluster(deployed, ray_address=args.ray_address)
    stopped = asyncio.run(running.stop())
    folder.remove_endpoint()
    _progress(
        f"Stopped {', '.join(stopped)}. What is committed is in the store."
        if stopped
        else f"No server of {_named(args.population)} runs on the cluster."
    )
    return 0


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs an event loop: that of uvloop, which is faster, where it is installed."""
    try:
        import uvloop
    except ImportError:  # Not on every system.
        asyncio.run(main)
    else:
        uvloop.run(main)


def _check(args: argparse.Namespace) -> None:
    for flag in ("address", "status_address"):
        addresses.split(getattr(args, flag), f"--{flag.replace('_', '-')}", can_listen=True)
    status_flags.check(args)
    if (args.certificate is None) != (args.private_key is None):
        raise validation.UsageError(
            "--certificate and --private-key must both be given, or neither."
        )
    if args.certificate and args.names:
        raise validation.UsageError(
            "--names are for a certificate that is made: leave out --certificate."
        )
    kinds = ("no_attestation", "attestation_keys", "attestation_roots")
    given = [f"--{kind.replace('_', '-')}" for kind in kinds if getattr(args, kind)]
    if len(given) > 1:
        raise validation.UsageError(f"{' and '.join(given)} exclude each other.")
    if args.attestation_revoked and not args.attestation_roots:
        raise validation.UsageError(
            "--attestation-revoked needs --attestation-roots: give the roots, too."
        )
    _check_engine(args)
    names = args.population
    if len(set(names)) != len(names):
        raise validation.UsageError(f"--population has a name twice ({_named(names)}): once each.")
    for flag in ("population_size", "shares"):
        given = getattr(args, flag)
        if given is not None and len(given) != len(names):
            raise validation.UsageError(
                f"--{flag.replace('_', '-')} has {len(given)} values for {len(names)} populations: "
                "give one for each, in the order of --population."
            )
    _check_shares(args)
    validation.positive("--round-seconds", args.round_seconds)
    validation.number("--most-over-selection", args.most_over_selection, at_least=1, at_most=1000)
    for flag in ("sessions_per_address", "sessions_per_connection"):
        if getattr(args, flag) is not None:
            validation.integer(f"--{flag.replace('_', '-')}", getattr(args, flag), minimum=1)
    for size in args.population_size or ():
        validation.positive("--population-size", size)


def _named(populations: Sequence[str]) -> str:
    """Returns the names of populations in a sentence, like "the population 'a'"."""
    names = " and ".join(map(repr, populations))
    return f"the population{'s' * (len(populations) > 1)} {names}"


def _by_population(args: argparse.Namespace, values: Sequence[float] | None) -> dict[str, float]:
    """Returns values by population; none if they are not given."""
    return {} if values is None else dict(zip(args.population, values, strict=True))


def _check_shares(args: argparse.Namespace) -> None:
    if args.shares is None:
        return
    if len(args.population) == 1:
        raise validation.UsageError(
            "--shares divide a server among several populations, and there is one: leave them out."
        )
    for share in args.shares:
        validation.number("--shares", share, at_least=0, at_most=1)
    if sum(args.shares) > 1 + 1e-9:
        raise validation.UsageError(
            f"--shares are {sum(args.shares):g} together, and may be 1 at most: lower them."
        )


def _check_populations(args: argparse.Namespace, tasks) -> None:
    """Refuses tasks of populations that are not served, and populations without a task."""
    for task in tasks:
        if task.population not in args.population:
            raise validation.UsageError(
                f"The task {task.name!r} is for the population {task.population!r}, not "
                f"{' or '.join(map(repr, args.population))}: add --population {task.population}, "
                "or leave the task out."
            )
    idle = [name for name in args.population if name not in {task.population for task in tasks}]
    if idle:
        raise validation.UsageError(
            f"There is no --task for {_named(idle)}: add one, or leave the population out."
        )


def _availability(given: str | None) -> tuple[float, ...]:
    """Reads the curve of the day of a flag's value: numbers, or the name of a file."""
    if given is None:
        return (1.0,) * 24
    text = pathlib.Path(given).read_text("utf-8-sig") if os.path.isfile(given) else given
    try:
        numbers = tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError:
        raise validation.UsageError(
            f"--availability {given[:80]!r} is no file, and has a word that is no number: give 24 "
            "numbers separated by commas, or a file with them."
        ) from None
    if len(numbers) != 24 or not all(0 <= n < math.inf for n in numbers) or not any(numbers):
        raise validation.UsageError(
            f"--availability has {len(numbers)} numbers, from {min(numbers, default=0):g} to "
            f"{max(numbers, default=0):g}: give 24, one for each hour of UTC, none negative or "
            "infinite, and not all zero."
        )
    return numbers


def _check_engine(args: argparse.Namespace) -> None:
    if args.engine != "ray":
        for flag in ("ray_address", "selectors", "workers", "detach", "stop"):
            if getattr(args, flag):
                raise validation.UsageError(
                    f"--{flag.replace('_', '-')} is of --engine ray: name it, too."
                )
        return
    for flag in ("selectors", "workers"):
        if getattr(args, flag) is not None:
            validation.integer(f"--{flag}", getattr(args, flag), minimum=1)
    if args.ray_address is None and (args.detach or args.stop):
        raise validation.UsageError(
            f"--{'detach' if args.detach else 'stop'} needs --ray-address: a Ray that is started "
            "here ends with this command."
        )
    if args.detach and args.until_done:
        raise validation.UsageError("--detach and --until-done exclude each other.")
    packages.require("--engine ray", "ray")


def _check_secure_aggregation(args: argparse.Namespace, tasks, folder) -> None:
    """Refuses tasks without secure sums where required, and tasks that no device can join."""
    from tff_dpftrl.runtime.tasks import summation_sentences

    stated = {task.name: task.folder.terms.secure_aggregation for task in tasks}
    clear = [name for name, secure in stated.items() if secure is None]
    if args.secure_aggregation and clear:
        raise validation.UsageError(
            f"--secure-aggregation: reports of {', '.join(map(repr, clear))} would be summed in "
            "the clear. Make the task anew, by task new --secure-aggregation "
            "--secagg-bits 20 and its other options, or leave out the flag."
        )
    for name, secure in stated.items():
        _progress(f"{name}: {summation_sentences.in_short(secure)}")
        if secure is None or secure.threat_model != "active-server":
            continue
        if args.no_attestation:
            raise validation.UsageError(
                f"--no-attestation: devices of {name!r} know each other by their attestation "
                "tokens, as its server may be active. Leave it out."
            )
        if args.attestation_roots:
            raise validation.UsageError(
                f"--attestation-roots: devices of {name!r} would show each other their "
                "certificates, as its server may be active. Name issuers of tokens by "
                "--attestation-keys in place of the roots."
            )
        if not args.attestation_keys:
            _progress(
                f"{name}: the issuer of attestation tokens is in {folder.path}: whoever has it can "
                "make up devices, and an active server would see reports. Name the key of another "
                "issuer by --attestation-keys."
            )


def _issuers(args: argparse.Namespace, folder) -> list[Any] | None:
    """Returns the files of the issuers' public keys; None if devices show no issuer's tokens."""
    if args.no_attestation or args.attestation_roots:
        return None
    return args.attestation_keys or [folder.issuer_public]


def _attestation(args: argparse.Namespace, folder):
    """Returns the verifier of devices' tokens; None if they are not verified."""
    from tff_dpftrl.runtime.server import attesting

    if args.no_attestation:
        _progress(_NO_ATTESTATION)
    issuers = _issuers(args, folder)
    return attesting.from_files(issuers, args.attestation_roots, args.attestation_revoked)


def _write_bundle(served: serving.Serving, folder, args: argparse.Namespace, keys) -> None:
    """Writes what devices on other machines have to know; they know a custom authority."""
    from tff_dpftrl.runtime import server_bundle

    if not served.address:  # No Selector has begun yet.
        return
    server = _address_for_devices(served.address, args)
    server_bundle.ServerBundle.of(
        args.population[0] if len(args.population) == 1 else "",  # Devices name theirs.
        server,
        None if args.certificate else folder.certificate,
        keys,
        _issuers(args, folder) or (),
    ).write(folder.bundle)
    hosts = (addresses.split(address)[0] for address in server.split(","))
    if not all(map(addresses.is_loopback, hosts)):
        _progress(f"Elsewhere:   copy {folder.bundle} there, and see tff-dpftrl device --help")


def _address_for_devices(address: str, args: argparse.Namespace) -> str:
    """Returns what devices connect to: the names that were given, or else the server's address.

    A server that listens on all addresses has the names of a certificate that was given.
    """
    from tff_dpftrl.runtime import tls

    if "," in address:  # Of several Selectors, each of which knows its own.
        return address
    host, port = addresses.split(address)
    names = args.names
    if not names and args.certificate and host in ("0.0.0.0", "::"):
        names = [n for n in tls.load(args.certificate, args.private_key).names if "*" not in n]
    names = names or [host]
    return ",".join(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names)


async def _serve(served: serving.Serving, folder, args: argparse.Namespace, keys) -> None:
    """Serves until a signal comes, or all is done."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, _end, args.detach, stop)
    if not await _has_started(served, stop):
        _progress("Stopped before it served anybody.")
        return
    loading = asyncio.ensure_future(_load(served, stop))
    try:
        _progress(f"Devices:     {served.address} (try: --server-folder {folder.path})")
        _write_bundle(served, folder, args, keys)
        token = f" (password: the token in {args.status_token})" if args.status_token else ""
        _progress(f"Status page: {served.page_address}{token}")
        waits = [asyncio.ensure_future(stop.wait())]
        if args.until_done:
            waits.append(asyncio.ensure_future(served.done.wait()))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    finally:
        loading.cancel()
        await served.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await loading
    if args.detach:
        _progress("The server goes on without this command; the same one finds it, --stop ends it.")
    elif stop.is_set():
        _progress(
            "Stopped. What is committed is in the store; the same command goes on from there. "
            f"What it comes to so far: {_report_command(args)}"
        )
    else:
        _progress(f"All rounds are done. Statement, metrics and model: {_report_command(args)}")


async def _load(served: serving.Serving, stop: asyncio.Event) -> None:
    """Gets the first rounds ready; a task that cannot have any stops the server."""
    from tff_dpftrl.runtime.server import garbage

    try:
        await served.load()
    except BaseException:
        stop.set()
        raise
    garbage.settle()


def _report_command(args: argparse.Namespace) -> str:
    store = "..." if "://" in args.store else args.store  # A URL may have a password in it.
    return shlex.join(["tff-dpftrl", "task", "report", args.task[0], "--store", store])


async def _has_started(served: serving.Serving, stop: asyncio.Event) -> bool:
    """Starts the server, and gives up if a signal ends it meanwhile."""
    starting, stopping = asyncio.ensure_future(served.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        await starting
        return True
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    await served.stop()
    return False


def _end(leaves: bool, stop: asyncio.Event) -> None:
    """Ends the server in order at the first signal, and the process at the second."""
    if stop.is_set():
        os._exit(128 + signal.SIGINT)
    if not leaves:
        _progress("Ending: devices are sent away, the lease is given back (again: at once).")
    stop.set()


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
