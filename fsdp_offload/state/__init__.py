"""From ``optimizer.state`` to state shards with homes, in one order; and the mapping that users see."""
