"""Decides, and touches nothing: buckets, their schedule in the ring, what stays on the device, orders, the bound."""
