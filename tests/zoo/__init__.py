"""Trains every optimizer class that a list of libraries has, plain and offloaded, and tells where the bits differ.

pip install --no-deps -r tests/zoo/requirements.txt
python -m tests.zoo --combinations full --json zoo.json --markdown docs/optimizers.md
"""
