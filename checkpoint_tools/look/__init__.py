"""Looking at checkpoints: their content, their tiling, whether they are whole, and what differs."""
