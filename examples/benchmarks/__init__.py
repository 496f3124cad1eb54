"""Measure offloading on this machine: ``python -m examples.benchmarks NAME``, from a clone.

Each benchmark prints JSON lines: one for the machine, then one per result. Install ``typer``; for pictures, also
``matplotlib``; for most models of ``front``, also ``transformers``.
"""
