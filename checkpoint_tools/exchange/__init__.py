"""Which keys are exchanged for which when fused tensors are split, or parts merged."""
