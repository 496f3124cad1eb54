"""One optimizer's state and its steps: homes, the step and its phases, the executor, lending to writers, loads."""
