"""Updates on the CPU (``host_fraction``), behind one small protocol."""
