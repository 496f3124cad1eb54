"""Read by every Python that has this folder in PYTHONPATH: a rank of gloo ends before the interpreter does.

A `DeviceMesh` keeps its process group beyond `destroy_process_group` (torch 2.11 to 2.13), and DTensor's caches keep
the mesh. A gloo thread that drops the tensors of the last collective while the interpreter ends then aborts the
process, without any of ours: once in fifty times on a busy machine. A group that goes waits for its threads.
"""

import atexit
import gc
import sys


@atexit.register
def _let_go_of_process_groups() -> None:
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is not None:
        for mesh in [thing for thing in gc.get_objects() if type(thing) is module.DeviceMesh]:
            getattr(mesh, "_pg_registry", {}).clear()
