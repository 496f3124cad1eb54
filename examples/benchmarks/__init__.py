"""Measure offloading on this machine: ``python -m examples.benchmarks NAME``, from a clone.

Each prints JSON lines: one for the machine, then one per figure. Install ``typer`` next to the package,
``matplotlib`` for pictures, and ``transformers`` for the models of ``front``.
"""
