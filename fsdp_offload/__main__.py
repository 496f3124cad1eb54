"""Command line: ``fsdp-offload plan MODEL``, ``fsdp-offload doctor``; also as ``python -m fsdp_offload``."""

import sys

from . import __version__

HELP = """usage: fsdp-offload COMMAND

  plan MODEL   what training will take in memory and time under each policy, and the line to write (extra [plan])
  doctor       versions, limits and link rates of this machine, for bug reports
  --version    the version of fsdp_offload

fsdp-offload plan --help tells more.
"""


def main() -> None:
    """Entry point of the console script."""
    command, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "plan":  # what it imports is an extra, and is imported by nobody else
        from .plan.command import app as plan

        plan(arguments, prog_name="fsdp-offload plan")
    elif command == "doctor" and not arguments:
        from .device.doctor import main as doctor

        doctor(__version__)
    elif command in ("--help", "-h"):
        sys.stdout.write(HELP)
    elif command == "--version":
        sys.stdout.write(f"fsdp-offload {__version__}\n")
    else:
        sys.stderr.write(f"fsdp-offload: {'unknown: ' + ' '.join(sys.argv[1:]) if command else 'no command'}\n\n{HELP}")
        sys.exit(2)


if __name__ == "__main__":
    main()
