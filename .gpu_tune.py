"""What the rehearsal sees in each measured step."""

import fsdp_offload.model.tune_resident as t, sys

orig = t.groups_to_keep


def spy(times, tol):
    r = orig(times, tol)
    print(
        "REHEARSAL stall %.2f window %.1f moving %.1f tol %.2f -> keep %s of %d groups left %.2f"
        % (times.stall_ms, times.window_ms, sum(times.move_ms.values()), tol, r[0], len(times.groups), r[1]),
        [round(w) for w in times.wanted_ms][:6],
        [round(max((times.updated_ms.get(b, 0) for b in g), default=0)) for g in times.groups][:6],
        file=sys.stderr,
    )
    return r


t.groups_to_keep = spy
from fsdp_offload.bench.__main__ import app

app()
