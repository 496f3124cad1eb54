"""One offloaded optimizer: which bytes have which home, its steps and backwards, and how it follows its user."""
