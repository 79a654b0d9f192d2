"""Command `d9d-torchrun`: torchrun, with an exit code that schedulers can act on, and fast restarts.

torchrun exits with 1 for every failure. This command exits with the code of the rank that failed first, so a scheduler
distinguishes a user error (2) from a hang (124). It forwards the signals that jobs handle, and then exits with the code
of its ranks, such as 75 after a save; it prints no traceback. It does not restart ranks after a user error, or after
they have stopped as requested. With `--warm`, ranks are forked from a process of the node that has imported their
modules, so a restart imports nothing. After a failure, ranks have ten seconds to end instead of 30, and the next
rendezvous takes half a second. All other arguments and behavior are the same as in torchrun.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: `d9d-torchrun [--warm] ARGUMENTS`.

    `--help` alone describes what differs from torchrun, without an import of torch.

    Raises:
        SystemExit: See `d9d_loop.elastic_launch.launch`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments in (["-h"], ["--help"]):
        parser = ArgumentParser(
            prog="d9d-torchrun",
            usage="d9d-torchrun [--warm] [OPTIONS OF TORCHRUN] SCRIPT [ARGUMENTS OF THE SCRIPT]",
            description="torchrun, with the exit code of the rank that failed first, signals that jobs handle, and "
            "fast restarts. It accepts all options of torchrun: see torchrun --help.",
            epilog="Example: d9d-torchrun --nproc-per-node 8 train.py --steps 100",
        )
        _add_options(parser)
        parser.print_help()
        return
    from d9d_loop.elastic_launch import launch  # noqa: PLC0415 - imports torch, which takes more than a second

    launch(arguments, _add_options)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--warm",
        action="store_true",
        help="Fork ranks from a process of this node that has already imported the modules of the script. Restarted "
        "ranks and spare nodes then start without these imports.",
    )


if __name__ == "__main__":
    main()
