"""Command line: ``fsdp-offload plan MODEL``, ``fsdp-offload doctor``; also as ``python -m fsdp_offload``."""

import sys

from . import __version__

HELP = """usage: fsdp-offload COMMAND

  plan MODEL   what training will take in memory and time under each policy, and the line to write (extra [plan])
  doctor       versions, limits and link rates of this machine, for bug reports
  --version    the version of fsdp_offload

fsdp-offload plan --help and fsdp-offload doctor --help tell more.
"""

DOCTOR_HELP = """usage: fsdp-offload doctor [--json]

Print what a bug report needs to say about this machine, one fact a line: versions, limits of host memory, NUMA nodes,
GPUs, and the rates of the link, for which it pins 2 GiB and copies 1 GiB each way. Without a GPU it prints the rest.
Nothing is sent anywhere.

  --json   the same facts as one JSON object
"""


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    command, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "plan":  # only this command needs the packages of the extra
        from .plan.command import app as plan

        plan(arguments, prog_name="fsdp-offload plan")
    elif command == "doctor" and arguments in (["--help"], ["-h"]):
        sys.stdout.write(DOCTOR_HELP)
    elif command == "doctor" and arguments in ([], ["--json"]):
        from .device.doctor import main as doctor

        doctor(__version__, as_json="--json" in arguments)
    elif command in ("--help", "-h"):
        sys.stdout.write(HELP)
    elif command == "--version":
        sys.stdout.write(f"fsdp-offload {__version__}\n")
    else:
        sys.stderr.write(f"fsdp-offload: {'unknown: ' + ' '.join(sys.argv[1:]) if command else 'no command'}\n\n{HELP}")
        sys.exit(2)


if __name__ == "__main__":
    main()
