"""Host time of an iteration, and where it goes."""

import sys, time, cProfile, pstats, io, json, os
import torch, torch.distributed as dist
from fsdp_offload.bench import train as t
from fsdp_offload import OffloadPolicy

with t._process_group() as device:
    bench = t.Bench(device, 24, 2048, 12, 2048, clip=False)
    for name in sys.argv[1:]:
        policy = {
            "plain": None,
            "iteration": OffloadPolicy(overlap="iteration", bucket_bytes=128 << 20),
            "parameters": OffloadPolicy(overlap="iteration", bucket_bytes=128 << 20, parameters=True),
            "parameters192": OffloadPolicy(overlap="iteration", bucket_bytes=192 << 20, parameters=True),
        }[name]
        with bench.settled(policy) as (o, clip):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            ms = bench._settled_ms(o, 6, clip=False)
            torch.accelerator.synchronize()
            a = time.perf_counter()
            c = time.process_time()
            bench._iterate(o, 4)
            b = time.perf_counter()
            c = time.process_time() - c
            torch.accelerator.synchronize()
            e = time.perf_counter()
            print(
                name,
                "ms %.1f host issue %.1f (cpu %.1f) until done %.1f peak %.2f reserved %.2f"
                % (
                    ms,
                    (b - a) / 4 * 1e3,
                    c / 4 * 1e3,
                    (e - a) / 4 * 1e3,
                    torch.accelerator.max_memory_allocated() / 1e9,
                    torch.accelerator.max_memory_reserved() / 1e9,
                ),
                flush=True,
            )
            eng = o.__dict__.get("_offload_engine")
            if eng is not None:
                eng = eng.engine
                print(" ring", eng.plan.ring.nbytes, "tuning", eng.tuning_of_staging, eng.tuning_of_residents)
                if eng.window is not None:
                    w = eng.window
                    el = o.__dict__["_offload_engine"].overlap._elastic
                    print(" window cap %.2f wanted %.2f" % (w.capacity_bytes / 1e9, w.wanted_bytes / 1e9))
                    if el._window_plan:
                        print(
                            " window plan points",
                            [round(x / 1e9, 1) for x in el._window_plan.at_points_bytes],
                            "uses",
                            [round(x / 1e9, 1) for x in el._window_plan.at_uses_bytes],
                        )
                    if el._plan:
                        print(
                            " ring plan points",
                            [round(x / 1e9, 1) for x in el._plan.at_points_bytes],
                            "uses",
                            [round(x / 1e9, 1) for x in el._plan.at_uses_bytes],
                        )
                    real = w._load
                    n = {}

                    def spy(number, d, must=False):
                        r = real(number, d, must=must)
                        k = "must" if must else "ahead" if r else "noroom"
                        n[k] = n.get(k, 0) + 1
                        return r

                    w._load = spy
                    realf = w.fill

                    def fill(b, s, lane):
                        g = w._group_of(b)
                        en = w._entries.get(g)
                        k = "fill-window" if en is not None and b not in en.outdated else "fill-home"
                        n[k] = n.get(k, 0) + 1
                        return realf(b, s, lane)

                    w.fill = fill
                    bench._iterate(o, 1)
                    print(" one iteration", n)
                    w._load = real
                    w.fill = realf
            pr = cProfile.Profile()
            pr.enable()
            bench._iterate(o, 3)
            pr.disable()
            torch.accelerator.synchronize()
            s = io.StringIO()
            pstats.Stats(pr, stream=s).sort_stats("tottime").print_stats(28)
            open(os.environ.get("OUT", "/tmp") + "/prof-%s.txt" % name, "w").write(s.getvalue())
            s = io.StringIO()
            pstats.Stats(pr, stream=s).sort_stats("cumulative").print_stats(60)
            open(os.environ.get("OUT", "/tmp") + "/cum-%s.txt" % name, "w").write(s.getvalue())
            if policy is not None and True:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                    bench._iterate(o, 4); torch.accelerator.synchronize()
                prof.export_chrome_trace(os.environ.get("OUT", "/tmp") + "/gpu-%s.json.gz" % name)
