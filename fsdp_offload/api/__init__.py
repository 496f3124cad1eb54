"""What the user holds: attaching and removing, the offloaded optimizer, checks. Wiring only."""
