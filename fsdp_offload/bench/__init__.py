"""Benches: ``python -m fsdp_offload.bench NAME``. Each prints JSON lines: one for the machine, then one per figure."""
