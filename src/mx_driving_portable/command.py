"""The command `mx-driving`. It refuses to start if the vendor's files replaced ours."""

from __future__ import annotations

import sys
import warnings

from . import beside, lost_files

__all__ = ["main"]


def main() -> None:
    """Run the command line. `record` imports neither mx_driving nor torch: the recorded program may import them later."""
    if sys.argv[1:2] == ["record"]:
        from . import record

        return record.main("mx-driving", sys.argv[2:])
    if lost_files():
        print(f"mx-driving: {beside()}", file=sys.stderr)
        sys.exit(2)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's warning; commands that need NumPy refuse to run
    try:
        from mx_driving.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"mx-driving: torch must be installed (pip install torch); got: {error}", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        if not hasattr(error, "is_of_setting"):
            raise
        print(f"mx-driving: {error}", file=sys.stderr)
        sys.exit(2)
    run()
