"""The user's interface: attaching and removing, the offloaded optimizer, checks. Wiring only."""
