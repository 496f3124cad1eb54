import torch, sys, os, functools, gc
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29611")
dev = sys.argv[1] if len(sys.argv) > 1 else "cuda"
dist.init_process_group("nccl" if dev == "cuda" else "gloo", rank=0, world_size=1)
mesh = init_device_mesh(dev, (1,))
from tests.overlapping import Loop, Net, adamw, evaluate
from tests.parity import attach, same_bits
from fsdp_offload import OffloadPolicy


def run(policy):
    l = Loop(mesh, adamw, None)
    if policy:
        attach(l.optimizer, model=l.model, policy=policy)
    return l.train(7, evaluate)


want = run(None).everything()
for o in ("step", "forward", "iteration"):
    for d in ("auto", 2 * 4096, 32 * 4096):
        l = run(OffloadPolicy(parameters=True, overlap=o, bucket_bytes=4096, device_bytes=d))
        got = l.everything()
        eng = l.optimizer.__dict__["_offload_engine"].engine
        print(
            o,
            d,
            all(same_bits(a, b) for a, b in zip(got, want, strict=True)),
            len(eng.plan._buckets),
            eng.window.capacity_bytes,
            eng.window.nbytes,
        )
