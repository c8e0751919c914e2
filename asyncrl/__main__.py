"""The `asyncrl` command: exit code 0 done, 2 something the user can mend, 1 a fault, 130 Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from asyncrl.errors import AsyncRLError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; faults that can be foreseen are one or two lines on stderr.

    ASYNCRL_TRACEBACK=1 shows their tracebacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale without the characters is no reason to end
            stream.reconfigure(errors="backslashreplace")
    from asyncrl.cli import app
    from asyncrl.cli.launch import with_resumed
    from asyncrl.monitor.words import clean

    try:
        app(args=with_resumed(sys.argv[1:] if argv is None else argv), prog_name="asyncrl")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except KeyboardInterrupt:
        return 130
    except (AsyncRLError, OSError) as e:
        if os.environ.get("ASYNCRL_TRACEBACK") == "1":
            raise
        for line in str(e).splitlines() or [type(e).__name__]:
            print(f"error: {clean(line)}", file=sys.stderr)
        return e.exit_code if isinstance(e, AsyncRLError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
