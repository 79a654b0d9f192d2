"""Launch of the ranks of a node by `d9d-torchrun`: torchrun's own code with other signals, exit codes and restarts."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from multiprocessing import forkserver

from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_loop import elastic_agent, elastic_rendezvous, warm_rank
from d9d_loop.rank_ends import RankEnds
from d9d_loop.resilience.exit_codes import QUIET_TORCHRUN, ExitCode
from d9d_loop.resilience.launcher_watch import LAUNCHER
from d9d_loop.resilience.lost_terminal import drop_lost_terminal, terminals
from d9d_loop.resilience.node_files import claims_report, read_job

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SAVE_SECONDS = 600  # time for ranks to save after a signal; a scheduler's own limit is usually shorter


def launch(arguments: Sequence[str], add_options: Callable[[ArgumentParser], None]) -> None:
    """Launch ranks with torchrun's arguments and the options that `add_options` adds; among them is `warm`.

    Raises:
        SystemExit: If a rank failed, with the exit code of the rank that failed first: 128 plus the number of a signal
            that killed it. With code 1 if the address of the job's store is in use. If this process received a signal,
            with the code of its ranks, such as 75 after a save, or 128 plus the number of the signal if there are no
            ranks.
    """
    os.environ[QUIET_TORCHRUN] = "1"
    os.environ[LAUNCHER] = str(os.getpid())
    parser = _parser(add_options)
    options = parser.parse_args(arguments)
    # With the shared store, a node keeps the address of the ranks' store over restarts, and a node that replaces
    # another one would never receive the address. Without the shared store, the nodes exchange it in each restart.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVE_SECONDS))
    ends, descriptors = RankEnds(), terminals()
    elastic_agent.install(ends)
    if options.rdzv_backend == "c10d":
        options.rdzv_backend = elastic_rendezvous.BACKEND
    try:
        with tempfile.TemporaryDirectory(prefix="d9d-torchrun-") as folder:
            os.environ[NODE_FOLDER] = folder
            if options.warm:
                _warm_up(options, parser)
            try:
                record(run.run)(options)
            except ChildFailedError:
                _report_dead_ranks(ends, options)
                raise
    except ChildFailedError:
        print(ends.describe(), file=sys.stderr)
        raise SystemExit(ends.exit_code()) from None
    except (DistNetworkError, RendezvousConnectionError) as error:
        print(_describe_network(options, error), file=sys.stderr)
        raise SystemExit(ExitCode.EXCEPTION) from None  # a restart may find the port free, or the other node up
    except SignalException as received:
        drop_lost_terminal(descriptors)
        raise SystemExit(ends.exit_code(default=128 + received.sigval)) from None


def _report_dead_ranks(ends: RankEnds, options: Namespace) -> None:
    """Report a failure of the job if no rank could, because all were killed or crashed.

    On several nodes, the ranks of the other nodes report it.
    """
    code, job = ends.exit_code(), read_job()
    if job is None or options.nnodes not in ("1", "1:1") or code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        return
    if claims_report():
        from d9d_loop.job.end_command import report_failure  # noqa: PLC0415 - only after failures

        folder, on_failure = job
        report_failure(folder, on_failure, rank=ends.rank_of(code), cause=ends.describe())


def _describe_network(options: Namespace, error: Exception) -> str:
    """Return the message about an address at which this node can neither listen nor reach the store of the job."""
    address = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    return (
        f"d9d-torchrun: this node can neither listen at {address} nor reach the job's store there: {error}. If another "
        "job of this host has the port, choose a free one with --master-port or --rdzv-endpoint, or use --standalone."
    )


def _parser(add_options: Callable[[ArgumentParser], None]) -> ArgumentParser:
    """Return torchrun's parser with more options, and with the signals that jobs handle."""
    parser = run.get_args_parser()
    add_options(parser)
    # Under nohup, SIGHUP stays ignored.
    names = [name for name in _SIGNALS if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN]
    parser.set_defaults(signals_to_handle=",".join(names))
    return parser


def _warm_up(options: Namespace, parser: ArgumentParser) -> None:
    """Start the process that imports the modules of the ranks, and change the options to fork ranks from it."""
    if options.no_python or options.run_path:
        parser.error("--warm cannot be combined with --no-python or --run-path; expected a Python script or --module")
    command = [*(["-m"] if options.module else []), options.training_script]
    os.environ[warm_rank.COMMAND] = json.dumps(command)
    forkserver.set_forkserver_preload([warm_rank.__name__])
    forkserver.ensure_running()
    options.start_method, options.run_path, options.module = "forkserver", True, False
    options.training_script = warm_rank.__file__
    options.training_script_args = [*command, *options.training_script_args]
    # Wait until the fork server has imported the modules: a spare node must not replace another node before that.
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()
