"""One cache with a known future: items, their uses in order, and the loop that fetches, updates and stores them."""
