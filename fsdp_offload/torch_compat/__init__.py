"""All private names of torch: DTensor, ``fully_shard``, optimizers' hooks; each with the versions it was seen in."""
