"""The command line's entry point: `pipelinerl`, or `python -m pipelinerl`."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code of a program that SIGINT has ended, as shells count."""


def main() -> None:
    """Run a command. Ctrl-C ends it without a traceback, also while its code is still being imported, which takes a second."""
    try:
        from pipelinerl.cli.entry import run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
